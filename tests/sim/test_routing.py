"""Hit rates of the routing policies on traces with fixed seeds: their order, and the bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus_runtime.router.policy import Endpoint
from isthmus_runtime.router.prefixes import StoredBlocks
from isthmus_runtime.sim.routing import EVENTS_ONLY, ORACLE, RoutingWorld, compare
from isthmus_runtime.sim.traces import generate_fan_out, generate_trace, read_trace, write_trace


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("routers", [1, 2])
def test_order_of_the_policies(seed, routers):
    trace = generate_trace(rate=4, duration_s=150, seed=seed)
    found = {r.policy: r for r in compare(trace, RoutingWorld(routers=routers))}
    rate = {name: r.hit_rate for name, r in found.items()}
    print(f"seed {seed} routers {routers}: {rate}")
    assert rate[ORACLE] >= rate["kv-aware"] > rate["round-robin"]
    assert rate["prefix-aware"] > rate["round-robin"]
    assert rate["kv-aware"] >= rate["prefix-aware"] - 0.01
    if routers > 1:  # a router does not know what another has sent
        assert rate["kv-aware"] > rate["prefix-aware"]
    assert found["kv-aware"].mean_wait_s < found["round-robin"].mean_wait_s
    assert all(r.imbalance < 1.6 for r in found.values())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("routers", [1, 2])
def test_what_is_on_its_way_counts_before_the_engine_reports_it(seed, routers):
    trace = generate_fan_out(rate=6, duration_s=150, seed=seed)
    rate = {r.policy: r.hit_rate for r in compare(trace, RoutingWorld(routers=routers))}
    print(f"seed {seed} routers {routers}: {rate}")
    assert rate[ORACLE] >= rate["kv-aware"] > rate[EVENTS_ONLY] + 0.1


def test_the_mooncake_format_gives_the_same(tmp_path):
    trace = generate_trace(rate=4, duration_s=60, seed=9)
    file = tmp_path / "trace.jsonl"
    write_trace(file, trace)
    direct, read = compare(trace, RoutingWorld()), compare(read_trace(file), RoutingWorld())
    for a, b in zip(direct, read, strict=True):  # times are rounded to milliseconds there
        assert (a.policy, a.hit_rate) == (b.policy, pytest.approx(b.hit_rate, abs=0.05))


def test_one_engine_leaves_no_choice():
    trace = generate_trace(rate=2, duration_s=60, seed=3)
    rates = {r.hit_rate for r in compare(trace, RoutingWorld(engines=1)) if r.policy != ORACLE}
    assert len(rates) == 1


def test_a_block_is_expected_until_its_event_or_for_so_many_prompts():
    engine, known = Endpoint("e", "f", block_size=16), StoredBlocks(expected_prompts=2)
    known.sent(engine, [1, 2])
    assert known.hit("e", [1, 2]) == 0, "it has reported nothing yet: perhaps it keeps nothing"
    known.apply("e", reset=True, previous=0, following=0, changes=())
    known.sent(engine, [1, 2, 3])
    assert known.hit("e", [1, 2, 3, 4]) == 3
    known.apply("e", reset=False, previous=0, following=3, changes=["+1", "+2", "-2"])
    assert (known.hit("e", [1, 2, 3]), known.hit("e", [3])) == (1, 1)
    known.sent(engine, [1, 5])
    assert known.hit("e", [3]) == 1
    known.sent(engine, [1, 6])
    assert [known.hit("e", [h]) for h in (1, 3, 5, 6)] == [1, 0, 1, 1]
    known.forget("e")
    assert known.hit("e", [6]) == 0


@given(st.lists(st.lists(st.integers(0, 50), max_size=8), max_size=40), st.integers(1, 5))
def test_expectations_are_bounded_and_those_of_the_last_prompts(prompts, bound):
    engine, known = Endpoint("e", "f", block_size=16), StoredBlocks(expected_prompts=bound)
    known.apply("e", reset=True, previous=0, following=0, changes=())
    for prompt in prompts:
        known.sent(engine, prompt)
    last = {h for prompt in prompts[-bound:] for h in prompt}
    assert {h for h in range(51) if known.hit("e", [h])} == last
