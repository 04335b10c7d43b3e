"""The proof: thousands of request lifetimes under faults, and runs that are the same each time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from isthmus_runtime.commands.simulate import simulate_main
from isthmus_runtime.engine.loop import STEPS_IN_FLIGHT
from isthmus_runtime.executor.fake import Windows
from isthmus_runtime.kv.groups import GroupPlan
from isthmus_runtime.sim.clock import Violation
from isthmus_runtime.sim.faults import Scenario, draw
from isthmus_runtime.sim.network import NetworkFaults
from isthmus_runtime.sim.proof import prove
from isthmus_runtime.sim.world import World, run_scenario
from isthmus_runtime.transfer.memory import Faults

LIFETIMES = 2400


@pytest.mark.slow
def test_every_invariant_holds_in_thousands_of_lifetimes() -> None:
    proof = prove(range(10_000), lifetimes=LIFETIMES)
    assert not proof.violations, proof.violations[0]
    assert proof.lifetimes >= LIFETIMES
    # The runs must really have been through what they claim to prove.
    happened = ("preemptions", "recomputes", "prefix hits", "fetched", "fetches failed", "transfers received")
    for fact in (*happened, "transfers failed", "scale-downs"):
        assert proof.facts[fact] > 0, f"{fact} never happened"
    for role in ("prefill", "decode", "router", "store"):
        assert proof.facts[f"{role} crashes"] > 0, f"no {role} crashed"
    for end in ("length", "left", "NeverFits", "DeadlineExceeded", "Overloaded", "TransferFailed"):
        assert proof.ends[end] > 0, f"no request ended with {end}"


KINDS = {"full": (None,), "sliding": (6,), "hybrid": (None, 6), "three": (9, None, 3)}
"""Sliding windows of the KV groups, in tokens; None keeps the whole prefix."""


MODES = ["store", pytest.param("memory", marks=pytest.mark.slow)]


@pytest.mark.parametrize("windows", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_without_faults_every_request_that_fits_ends_well(mode: str, windows: Windows) -> None:
    calm = Scenario(
        seed=1,
        mode=mode,
        windows=windows,
        disconnect=0.0,
        timeouts_s=(60.0,),
        queue_timeout_s=60.0,
        link_bytes_per_s=1e7,
        store_blocks=2000,
    )
    for seed in range(3):
        outcome = run_scenario(replace(calm, seed=seed))
        assert set(outcome.ends) <= {"length", "stop", "NeverFits"}, outcome.ends
        assert outcome.facts["transfers failed"] == 0
        assert outcome.facts["transfers received"] > 10


@pytest.mark.parametrize("windows", list(KINDS.values())[1:], ids=list(KINDS)[1:])
@pytest.mark.parametrize("mode", MODES)
def test_pools_of_the_least_size_finish_what_they_take(mode: str, windows: Windows) -> None:
    """A prompt may be much longer than the pool where windows are short; every role must get through with its peak."""
    calm = Scenario(
        seed=1,
        mode=mode,
        windows=windows,
        disconnect=0.0,
        timeouts_s=(120.0,),
        queue_timeout_s=120.0,
        link_bytes_per_s=1e7,
        disaggregate_above=0,
        budget=4,
        max_model_len=120,
        prompt_max=110,
        store_blocks=10_000,
    )
    groups = [
        GroupPlan(block_size=4, window=w, tokens_in_flight=0 if w is None else STEPS_IN_FLIGHT * 4) for w in windows
    ]
    least = sum(group.blocks_needed(120) for group in groups) + 1
    for seed in range(2):
        outcome = run_scenario(replace(calm, seed=seed, prefill_blocks=least, decode_blocks=least))
        assert set(outcome.ends) <= {"length", "stop", "NeverFits"}, outcome.ends
        assert outcome.facts["transfers failed"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("windows", list(KINDS.values())[1:], ids=list(KINDS)[1:])
def test_the_invariants_hold_for_sliding_and_hybrid_models_too(windows: Windows) -> None:
    facts: Counter[str] = Counter()
    for seed in range(12):
        facts.update(run_scenario(replace(draw(seed), windows=windows)).facts)
    for fact in ("prefix hits", "transfers received", "transfers failed"):
        assert facts[fact] > 0, f"{fact} never happened"


@pytest.mark.parametrize("seed", [0, 3])
def test_a_seed_gives_the_same_history_each_time(seed: int) -> None:
    """Seed 0's router crashes with many requests under way: they must break in one order."""

    def history() -> tuple[object, list[str]]:
        world = World(draw(seed))
        return world.run(), world.clock.lines(100_000)

    assert history() == history()


def test_recompute_hides_every_transfer_failure() -> None:
    broken = Scenario(
        seed=1,
        recompute=True,
        disconnect=0.0,
        timeouts_s=(60.0,),
        queue_timeout_s=60.0,
        transfer=Faults(partial=0.4, wrote_all_but_failed=0.4),
        network=NetworkFaults(),
    )
    for seed in range(3):
        outcome = run_scenario(replace(broken, seed=seed))
        assert set(outcome.ends) <= {"length", "stop", "NeverFits"}, outcome.ends
        assert outcome.facts["recomputes"] > 0


def test_a_failure_names_seed_command_and_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus_runtime.sim.world.check_engine", _fail)
    with pytest.raises(Violation, match=r"(?s)seed 7 at .*replay: isthmus-runtime simulate --proof --seed 7\n.*client"):
        run_scenario(draw(7))


def _fail(*args: object, **options: object) -> None:
    raise Violation("made up")


def test_the_replay_command_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate_main(["--proof", "--seed", "7"]) == 0
    assert "40 request lifetimes in 1 seeds" in capsys.readouterr().out


def test_a_violation_ends_the_command_with_status_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isthmus_runtime.sim.world.check_engine", _fail)
    assert simulate_main(["--proof", "--lifetimes", "200"]) == 1
    assert "made up" in capsys.readouterr().out
