"""Each test breaks one rule of the core and demands that the simulator notices within a stated number of seeds.

A mutation that survives means that an invariant or a scenario is missing. `-s` shows the table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partialmethod
from typing import Any

import pytest
from engine_world import World, request

from isthmus_runtime.engine import blocks as blocks_module
from isthmus_runtime.engine import handoffs as handoffs_module
from isthmus_runtime.engine.admission import Admission
from isthmus_runtime.engine.blocks import Hits, SequenceBlocks
from isthmus_runtime.engine.completion import Completion
from isthmus_runtime.engine.fetches import Fetches
from isthmus_runtime.engine.handoffs import Handoffs
from isthmus_runtime.engine.in_flight import StepsInFlight
from isthmus_runtime.engine.intake import Intake
from isthmus_runtime.engine.loop import STEPS_IN_FLIGHT, EngineLoop
from isthmus_runtime.engine.preemption import Preemption
from isthmus_runtime.engine.scheduler import Scheduler
from isthmus_runtime.engine.sequence import Effect, Kind, Sequence
from isthmus_runtime.interfaces.handoff import BlockRef
from isthmus_runtime.interfaces.steps import StepOutput, StepPlan
from isthmus_runtime.interfaces.transport import TransferResult
from isthmus_runtime.kv.groups import GroupPlan
from isthmus_runtime.kv.keys import ExtraKeys
from isthmus_runtime.kv.pool import BlockPool
from isthmus_runtime.protocol.ticket import PrefillRecord
from isthmus_runtime.request import FinishReason
from isthmus_runtime.router import policy
from isthmus_runtime.sim import store as store_module
from isthmus_runtime.sim.clock import Violation
from isthmus_runtime.sim.faults import Scenario, draw
from isthmus_runtime.sim.store import StoreTransfer
from isthmus_runtime.sim.world import run_scenario
from isthmus_runtime.transfer import agent as agent_module
from isthmus_runtime.transfer import attempts as attempts_module
from isthmus_runtime.transfer import leg as leg_module
from isthmus_runtime.transfer.agent import TransferAgent
from isthmus_runtime.transfer.record import Expected

Patch = pytest.MonkeyPatch
TABLE: list[tuple[str, int, str]] = []


@dataclass(frozen=True)
class Mutation:
    """How to break a rule, and in which worlds to look."""

    name: str
    apply: Callable[[Patch], None]
    seeds: int = 30
    shape: Callable[[Scenario], Scenario] = lambda scenario: scenario


def memory(scenario: Scenario) -> Scenario:
    return replace(scenario, mode="memory", disaggregate_above=0)


def store(scenario: Scenario) -> Scenario:
    return replace(scenario, mode="store", disaggregate_above=0, store_blocks=400)


def flaky(scenario: Scenario) -> Scenario:
    """Transfers go wrong in every way."""
    faults = replace(
        scenario.transfer, partial=0.1, wrote_all_but_failed=0.1, never=0.2, duplicate=0.1, delay=0.2, late_s=0.5
    )
    return replace(memory(scenario), transfer=faults, transfer_timeout_s=0.3)


def flaky_store(scenario: Scenario) -> Scenario:
    return replace(flaky(scenario), mode="store", store_blocks=400)


def damaged_store(scenario: Scenario) -> Scenario:
    """Values in the pool turn into others."""
    return replace(store(scenario), transfer=replace(scenario.transfer, damaged=0.2))


def fetching(scenario: Scenario) -> Scenario:
    """Several prefill engines, of which one has computed what another is asked for, and a pool that often fails."""
    faults = replace(scenario.transfer, partial=0.1, never=0.2, late_s=0.5)
    return replace(store(scenario), prefills=2, prefix_caching=True, transfer=faults, transfer_timeout_s=0.3)


def early(scenario: Scenario) -> Scenario:
    return replace(scenario, early=True, disconnect=0.4, disaggregate_above=0)


def tight(scenario: Scenario) -> Scenario:
    """Hardly enough blocks: preemption."""
    fits = scenario.max_model_len // scenario.block_size + 3
    return replace(scenario, decode_blocks=fits, prefill_blocks=fits, rows=4, disconnect=0.0, output_max=24)


def busy(scenario: Scenario) -> Scenario:
    """Slow steps, hardly enough blocks, clients that leave: blocks change hands while a step runs."""
    return replace(
        tight(scenario),
        mode="memory",
        disaggregate_above=0,
        decode_slower=30.0,
        step_s=0.002,
        disconnect=0.7,
        link_bytes_per_s=1e7,
        spread_s=1.0,
        rows=2,
        prefix_caching=False,
    )


def lossy_store(scenario: Scenario) -> Scenario:
    """Answers get lost and hang-ups come late: attempts of one request overlap."""
    net = replace(scenario.network, lose=0.05, delay=0.4, delay_s=1.5, reset=0.2)
    return replace(store(scenario), network=net, prefills=2, decodes=2)


def hybrid(scenario: Scenario) -> Scenario:
    """Two KV groups, one with a short window, in prompts of several windows."""
    return replace(memory(scenario), windows=(None, 5), prompt_max=scenario.max_model_len - 4)


def tight_sliding(scenario: Scenario) -> Scenario:
    """A short window, and not one block more than the longest request needs."""
    budget, size = 3, min(4, scenario.block_size)
    group = GroupPlan(block_size=size, window=5, tokens_in_flight=STEPS_IN_FLIGHT * budget)
    least = group.blocks_needed(64) + 1
    return replace(
        memory(scenario),
        windows=(5,),
        budget=budget,
        block_size=size,
        max_model_len=64,
        prompt_max=56,
        prefill_blocks=least,
        decode_blocks=least,
    )


def leaving(scenario: Scenario) -> Scenario:
    return replace(memory(scenario), disconnect=0.5)


def late_calls(scenario: Scenario) -> Scenario:
    """Prefill restarts while calls to it are on their way."""
    net = replace(scenario.network, delay=0.4, delay_s=1.5, duplicate=0.3)
    return replace(
        memory(scenario), network=net, crashes=("prefill",) * 4, timeouts_s=(0.3,), spread_s=2.0, disconnect=0.3
    )


# -------------------------------------------------------------------------------------------------------- mutations


def receiver_frees_without_drain(p: Patch) -> None:
    real = Handoffs.released

    def released(self: Handoffs, attempt: str, drained: bool) -> bool:
        hold = self._holds.get(attempt)
        return real(self, attempt, drained or (hold is not None and hold.receiving))

    p.setattr(Handoffs, "released", released)


def sender_frees_without_drain(p: Patch) -> None:
    real = Handoffs.released

    def released(self: Handoffs, attempt: str, drained: bool) -> bool:
        hold = self._holds.get(attempt)
        return real(self, attempt, drained or (hold is not None and not hold.receiving))

    p.setattr(Handoffs, "released", released)


def publish_early(p: Patch) -> None:
    real = Scheduler.schedule

    def schedule(self: Scheduler, now: float) -> tuple[StepPlan | None, list[Effect]]:
        planned = real(self, now)
        for seq in self.queues.running:
            written, seq.written = seq.written, seq.scheduled
            self.blocks.wrote(seq)
            self.blocks.publish()
            seq.written = written
        return planned

    p.setattr(Scheduler, "schedule", schedule)


def publish_before_arrival(p: Patch) -> None:
    """A receiver shows the hashes of blocks that are still being filled."""
    p.setattr(BlockPool, "lease_write", lambda self, ids: None)
    p.setattr(BlockPool, "end_write", lambda self, ids, ok: None)
    real = Handoffs.reserve

    def reserve(self: Handoffs, seq: object) -> object:
        effect = real(self, seq)  # type: ignore[arg-type]
        seq.written = seq.prompt_len  # type: ignore[attr-defined]
        self._blocks.wrote(seq)  # type: ignore[arg-type]
        self._blocks.publish()
        seq.written = 0  # type: ignore[attr-defined]
        return effect

    p.setattr(Handoffs, "reserve", reserve)


def ignore_seals(p: Patch) -> None:
    """What is read is taken for what was put."""
    p.setattr(store_module, "whole", lambda key, value: True)


def remove_all_on_failure(p: Patch) -> None:
    """One damaged block, and all that its request shares with others is removed."""
    real = StoreTransfer.read

    def read(self: StoreTransfer, attempt: str, pieces: Any, timeout_s: float, done: Any) -> None:
        def ended(result: TransferResult) -> None:
            if "damaged" in result.reason:
                for piece in pieces:
                    self.store.remove_damaged(piece.key)
            done(result)

        real(self, attempt, pieces, timeout_s, ended)

    p.setattr(StoreTransfer, "read", read)


def drop_attempt_check(p: Patch) -> None:
    """Records are found by request and accepted from any attempt."""
    p.setattr(StoreTransfer, "record_name", lambda self, attempt: "record:" + attempt.partition(".")[0])
    real = attempts_module.mismatch

    def any_attempt(record: PrefillRecord, want: Expected) -> str:
        return real(record.model_copy(update={"attempt": want.attempt}), want)

    p.setattr(attempts_module, "mismatch", any_attempt)


def skip_never_fit(p: Patch) -> None:
    p.setattr(Intake, "check_fits", lambda self, request, kind: None)


def forget_sibling_cancel(p: Patch) -> None:
    p.setattr(Handoffs, "open", lambda self, attempt: False)


def double_release(p: Patch) -> None:
    p.setattr(BlockPool, "_check_holds", lambda *args, **kwargs: None)
    real = StepsInFlight.release

    def release(self: StepsInFlight, seq: Sequence, ids: list[int]) -> None:
        real(self, seq, ids)
        if ids and self._pool.refs(ids[0]):
            self._pool.release(ids[:1])

    p.setattr(StepsInFlight, "release", release)


def leak_on_preemption(p: Patch) -> None:
    real = Preemption.preempt

    def preempt(self: Preemption, seq: Sequence) -> None:
        kept = [ids[:1] for ids in seq.blocks]
        self._pool.touch([b for ids in kept for b in ids])
        real(self, seq)

    p.setattr(Preemption, "preempt", preempt)


def ignore_deadlines(p: Patch) -> None:
    p.setattr(Scheduler, "tick", lambda self, now: [])


def ignore_leg_deadlines(p: Patch) -> None:
    p.setattr(TransferAgent, "tick", lambda self, now: None)
    p.setattr(TransferAgent, "next_deadline", lambda self: None)


def pair_unequal(p: Patch) -> None:
    p.setattr(policy, "_peers", lambda engines, decode, facts: engines.prefill)


def accept_incomplete(p: Patch) -> None:
    """A read or write that moved only a part counts as whole."""
    real = leg_module._op_done
    p.setattr(leg_module, "_op_done", lambda leg, event, now: real(leg, replace(event, ok=True), now))


def skip_fence(p: Patch) -> None:
    p.setattr(StepsInFlight, "release", lambda self, seq, ids: self._pool.release(ids))


def record_first(p: Patch) -> None:
    def finish(leg: leg_module.Leg, now: float) -> leg_module.Step:
        timer = min(leg.deadline_s, now + leg.timeout_s)
        return leg_module._start_record(replace(leg, state=leg_module.LegState.SENDING, started_s=now, timer_s=timer))

    p.setattr(leg_module, "_finish", finish)


def no_reader_lease(p: Patch) -> None:
    p.setattr(BlockPool, "lease_read", lambda self, ids: None)
    p.setattr(BlockPool, "end_read", lambda self, ids: None)


def timeout_is_a_drain(p: Patch) -> None:
    real = leg_module._account
    p.setattr(leg_module, "_account", lambda leg, event: real(leg, replace(event, settled=True)))


def peer_is_never_asked(p: Patch) -> None:
    """A receiver thinks that nobody writes once its own operations ended."""
    real = leg_module.new_leg
    p.setattr(agent_module.lg, "new_leg", lambda *a, **k: real(*a, **{**k, "peer_writes": False}))


def drain_answer_lies(p: Patch) -> None:
    p.setattr(TransferAgent, "is_drained", lambda self, attempt: True)


def ignore_duplicates(p: Patch) -> None:
    """A repeated call takes over the holds of an ended attempt."""
    p.setattr(Handoffs, "known", lambda self, attempt: False)


def wrong_hit_length(p: Patch) -> None:
    real = SequenceBlocks.find_hits

    def find(self: SequenceBlocks, seq: object, most: int) -> Hits:
        hits = real(self, seq, most)  # type: ignore[arg-type]
        return replace(hits, tokens=hits.tokens + 1) if 0 < hits.tokens < most else hits

    p.setattr(SequenceBlocks, "find_hits", find)


def salt_is_ignored(p: Patch) -> None:
    for module in (blocks_module, handoffs_module):
        p.setattr(module, "extra_keys", lambda request: ExtraKeys(cache_salt=""))


def lose_wake_up(p: Patch) -> None:
    real = EngineLoop._take_results

    def take(self: EngineLoop, now: float) -> list[Effect]:
        effects = real(self, now)
        self._wake = False
        return effects

    p.setattr(EngineLoop, "_take_results", take)


def end_twice(p: Patch) -> None:
    real = Completion.complete

    def complete(self: Completion, output: StepOutput, now: float) -> list[Effect]:
        effects = real(self, output, now)
        return effects + [e for e in effects if isinstance(e, tuple) and e[1].finish_reason is not None]

    p.setattr(Completion, "complete", complete)


def end_never(p: Patch) -> None:
    real = Completion.end
    p.setattr(
        Completion,
        "end",
        lambda self, seq, reason, error: [e for e in real(self, seq, reason, error) if not isinstance(e, tuple)],
    )


def quarantine_for_ever(p: Patch) -> None:
    p.setattr(Handoffs, "drained", lambda self, attempt: False)


def hits_are_free_twice(p: Patch) -> None:
    """Admission forgets that taking evictable hits shrinks the free list."""
    real = SequenceBlocks.find_hits
    p.setattr(SequenceBlocks, "find_hits", lambda self, seq, most: replace(real(self, seq, most), evictable=0))


def restarted_prefill_sends(p: Patch) -> None:
    """A prefill process does not mind that the ticket was meant for the one before it."""
    real = TransferAgent.__init__
    p.setattr(TransferAgent, "__init__", lambda self, *a, **k: real(self, *a, **{**k, "epoch": ""}))


def skip_first_token(p: Patch) -> None:
    real = Handoffs.prompt_done

    def done(self: Handoffs, seq: object, token: int, logprob: object) -> object:
        return real(self, seq, (token + 1) % 997, logprob)  # type: ignore[arg-type]

    p.setattr(Handoffs, "prompt_done", done)


def admit_without_room(p: Patch) -> None:
    """Prompts are admitted although their blocks are not there."""
    p.setattr(Admission, "free", lambda self: 10**6)


def prefill_is_kept_on_failure(p: Patch) -> None:
    """Decode's failed leg never stops: `Stop` and `Ask` are forgotten."""
    real = leg_module._settle

    def settle(leg: leg_module.Leg, now: float) -> leg_module.Step:
        if not leg.quiet and leg.state is leg_module.LegState.CANCELLING:
            return replace(leg, timer_s=leg_module.NEVER), ()
        return real(leg, now)

    p.setattr(leg_module, "_settle", settle)


def send_the_first_group_for_all(p: Patch) -> None:
    """As before handoffs knew of groups: the blocks of group 0 under the keys of another."""
    real = Handoffs._refs

    def refs(self: Handoffs, seq: Sequence, group: int, indices: Collection[int]) -> list[BlockRef]:
        right = real(self, seq, group, indices)
        sends = seq.kind is Kind.SEND
        return [replace(ref, block_id=seq.blocks[0][ref.index]) if sends else ref for ref in right]

    p.setattr(Handoffs, "_refs", refs)


def pass_a_window_too_early(p: Patch) -> None:
    real = GroupPlan.passed
    p.setattr(GroupPlan, "passed", lambda self, length: real(self, length + self.block_size))


def keep_what_windows_passed(p: Patch) -> None:
    p.setattr(SequenceBlocks, "trim", lambda self, seq: [])


def keep_blocks_without_ticket(p: Patch) -> None:
    """A prompt that ends before its ticket tells a transfer that does not know of it, and nobody else."""
    p.setattr(Handoffs, "awaits_ticket", lambda self, attempt: False)


def hand_a_failed_fetch_on(p: Patch) -> None:
    """A fetch that failed is over, whatever its call may still write."""
    real = Fetches.ended
    p.setattr(Fetches, "ended", lambda self, name, count, now, fault: real(self, name, count or 0, now, fault=fault))


def show_more_than_was_fetched(p: Patch) -> None:
    real = SequenceBlocks.show

    def show(self: SequenceBlocks, seq: Sequence, first: int, count: int) -> None:
        real(self, seq, first, len(seq.blocks[0]) - first)

    p.setattr(SequenceBlocks, "show", show)
    p.setattr(BlockPool, "end_write", partialmethod(_end_write_well, BlockPool.end_write))


def _end_write_well(self: BlockPool, real: Callable[..., None], ids: list[int], ok: bool) -> None:
    real(self, ids, True)


def forget_who_fetched(p: Patch) -> None:
    """A fetch that failed leaves its request where it is."""
    real = Fetches.ended

    def ended(self: Fetches, name: str, count: int | None, now: float, *, fault: bool) -> bool:
        return fault or real(self, name, count, now, fault=fault)

    p.setattr(Fetches, "ended", ended)


MUTATIONS = [
    Mutation("hand the blocks of a failed fetch on", hand_a_failed_fetch_on, shape=fetching),
    Mutation("show more than was fetched", show_more_than_was_fetched, shape=fetching),
    Mutation("forget whose fetch has failed", forget_who_fetched, shape=fetching),
    Mutation("receiver frees without drain", receiver_frees_without_drain, shape=flaky),
    Mutation("sender frees without drain", sender_frees_without_drain, shape=flaky),
    Mutation("publish a hash before the step ran", publish_early),
    Mutation("publish a hash before the KV arrived", publish_before_arrival, shape=memory),
    Mutation("drop the attempt id check", drop_attempt_check, shape=lossy_store),
    Mutation("ignore the seals of values", ignore_seals, shape=damaged_store),
    Mutation("remove more than what is damaged", remove_all_on_failure, shape=damaged_store),
    Mutation("skip the never-fit check", skip_never_fit),
    Mutation("forget the sibling's cancel", forget_sibling_cancel, shape=leaving),
    Mutation("release a block twice", double_release),
    Mutation("leak a block on preemption", leak_on_preemption, shape=tight),
    Mutation("keep the blocks of who ends before its ticket", keep_blocks_without_ticket, shape=early),
    Mutation("ignore request deadlines", ignore_deadlines, shape=lambda s: replace(s, timeouts_s=(0.1, 0.3))),
    Mutation("ignore leg deadlines", ignore_leg_deadlines, shape=flaky),
    Mutation("pair unequal fingerprints", pair_unequal, shape=lambda s: replace(s, odd_fingerprint=True)),
    Mutation("accept an incomplete set of keys", accept_incomplete, shape=flaky_store),
    Mutation("skip the fence of steps in flight", skip_fence, shape=busy),
    Mutation("write the record before the blocks", record_first, shape=flaky),
    Mutation("send without reader leases", no_reader_lease, shape=memory),
    Mutation("take a timeout for a drain", timeout_is_a_drain, shape=flaky_store),
    Mutation("never ask the peer for its drain", peer_is_never_asked, shape=leaving),
    Mutation("acknowledge every drain", drain_answer_lies, shape=late_calls, seeds=60),
    Mutation("ignore the duplicates check", ignore_duplicates, shape=lambda s: flaky(late_calls(s)), seeds=60),
    Mutation("wrong hit length", wrong_hit_length, shape=lambda s: replace(s, prefix_caching=True)),
    Mutation("ignore the cache salt", salt_is_ignored, shape=lambda s: replace(s, prefix_caching=True)),
    Mutation("lose a wake-up", lose_wake_up),
    Mutation("end a request twice", end_twice),
    Mutation("end a request without saying so", end_never),
    Mutation("quarantine for ever", quarantine_for_ever, shape=flaky),
    Mutation("count evictable hits as free blocks", hits_are_free_twice, shape=tight),
    Mutation("restarted prefill sends for an old ticket", restarted_prefill_sends, shape=late_calls, seeds=60),
    Mutation("wrong first token in the record", skip_first_token, shape=memory),
    Mutation("admit without room", admit_without_room, shape=tight),
    Mutation("forget to stop a failed leg", prefill_is_kept_on_failure, shape=flaky),
    Mutation("send one KV group's blocks for another's", send_the_first_group_for_all, shape=hybrid),
    Mutation("pass a window too early", pass_a_window_too_early, shape=hybrid),
    Mutation("keep what windows have passed", keep_what_windows_passed, shape=tight_sliding),
]
LONG = {
    "count evictable hits as free blocks",
    "drop the attempt id check",
    "keep what windows have passed",
    "never ask the peer for its drain",
    "skip the fence of steps in flight",
    "skip the never-fit check",
}
"""Those that take more than a second to be caught."""
assert {mutation.name for mutation in MUTATIONS} > LONG


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(mutation, id=mutation.name, marks=[pytest.mark.slow] if mutation.name in LONG else [])
        for mutation in MUTATIONS
    ],
)
def test_a_broken_rule_is_noticed(mutation: Mutation, monkeypatch: Patch) -> None:
    mutation.apply(monkeypatch)
    for seed in range(mutation.seeds):
        try:
            run_scenario(mutation.shape(draw(seed)))
        except Violation as violation:
            first = str(violation).splitlines()[0]
            TABLE.append((mutation.name, seed + 1, first))
            print(f"\n{mutation.name:44} caught by seed {seed + 1:>2}/{mutation.seeds}: {first[:150]}")
            return
    pytest.fail(f"{mutation.name}: not noticed in {mutation.seeds} seeds")


SHAPES = (
    memory,
    store,
    fetching,
    flaky,
    flaky_store,
    lossy_store,
    tight,
    busy,
    hybrid,
    tight_sliding,
    leaving,
    late_calls,
)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=lambda f: f.__name__)
def test_the_worlds_of_the_mutations_hold_without_one(shape: Callable[[Scenario], Scenario]) -> None:
    for seed in range(2):
        run_scenario(shape(draw(seed)))


# In the worlds above the check of `complete` that a result belongs to the request's present run cannot be missed: their
# prefill engines only ever prefill, and a prompt whose blocks were all promised at admission is never preempted; on
# decode a result of an abandoned run finds a waiting request without blocks, where there is nothing to publish. It
# takes an engine that generates and prefills for a peer.


def take_results_of_abandoned_runs(p: Patch) -> None:
    real = Scheduler.complete

    def complete(self: Scheduler, output: StepOutput, now: float) -> list[Effect]:
        step, work = self.steps.steps[0]
        self.steps.steps[0] = (step, [(seq, seq.run, chunk) for seq, _, chunk in work])
        return real(self, output, now)

    p.setattr(Scheduler, "complete", complete)


def prompt_for_a_peer_is_preempted_in_mid_step() -> World:
    """An older request grows into the blocks that a chunked prompt for a peer still needs."""
    world = World(num_blocks=15, max_batched_tokens=8, prefix_caching=False)
    world.add(request("older", [7] * 8, 30))
    for _ in range(3):
        world.turn()
    world.add(request("sent", list(range(40)), 1), kind=Kind.SEND, attempt="sent.1")
    world.scheduler.handoffs.open_send("sent.1")
    while not world.scheduler.stats().preemptions:
        assert world.turn()
    world.turn()
    return world


def test_a_result_of_an_abandoned_run_is_dropped() -> None:
    world = prompt_for_a_peer_is_preempted_in_mid_step()
    world.scheduler.abort("sent", "sent.1", "seen enough")
    world.scheduler.released("sent.1", True)
    world.run()
    assert world.finish("older") is FinishReason.LENGTH


def test_taking_results_of_abandoned_runs_is_noticed(monkeypatch: Patch) -> None:
    take_results_of_abandoned_runs(monkeypatch)
    with pytest.raises(IndexError):
        prompt_for_a_peer_is_preempted_in_mid_step()
