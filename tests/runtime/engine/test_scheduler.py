"""The scheduler over a fake executor whose tokens depend on every KV byte: right tokens, one ending, no leak."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from engine_world import World, make_plan, request
from forced_stretches import Stretches
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_runtime.config import SchedulerConfig
from isthmus_runtime.engine import drafts
from isthmus_runtime.engine.aging import EVERY
from isthmus_runtime.engine.completion import TICKET_S
from isthmus_runtime.engine.drafters import Drafter
from isthmus_runtime.engine.scheduler import Scheduler
from isthmus_runtime.engine.sequence import CancelAttempt, FinishSend, Kind, OpenReceive, Phase, SendBlocks
from isthmus_runtime.errors import DeadlineExceeded, EngineFailed, InvalidRequest, NeverFits, Overloaded, TransferFailed
from isthmus_runtime.executor.fake import Windows, expected_tokens
from isthmus_runtime.interfaces.handoff import BlockRef
from isthmus_runtime.interfaces.steps import Forced, Later
from isthmus_runtime.kv.keys import keys_digest
from isthmus_runtime.kv.pool import BlockPool
from isthmus_runtime.protocol.ticket import PrefillRecord
from isthmus_runtime.request import FinishReason, SamplingParams


def expect(world: World, sid: str, prompt: list[int], max_tokens: int) -> None:
    count = min(max_tokens, world.max_model_len - len(prompt))
    req = request(sid, prompt, max_tokens)
    assert world.tokens[sid] == expected_tokens(prompt, req.sampling, count)
    assert world.finish(sid) is FinishReason.LENGTH


def test_one_request_by_chunks() -> None:
    world = World(max_batched_tokens=5)
    prompt = list(range(23))
    world.add(request("a", prompt, 7))
    world.run()
    expect(world, "a", prompt, 7)


def test_a_batch_of_mixed_lengths_shares_the_budget() -> None:
    world = World(num_blocks=65)
    prompts = {f"r{i}": [i * 7 + j for j in range(1 + 5 * i)] for i in range(6)}
    for sid, prompt in prompts.items():
        world.add(request(sid, prompt, 3 + len(sid)))
    world.run()
    for sid, prompt in prompts.items():
        expect(world, sid, prompt, 3 + len(sid))


def test_choices_that_wait_share_their_prompt() -> None:
    world = World(max_num_seqs=2)
    prompt = tuple(range(18))
    for number in range(5):
        world.add(replace(request(f"r{number}", list(prompt), 4), prompt_token_ids=prompt))
    world.turn()
    waiting = [seq for seq in world.scheduler.queues.live.values() if seq.row < 0]
    assert len(waiting) >= 3 and all(seq.tokens is prompt for seq in waiting)
    world.run()
    for number in range(5):
        expect(world, f"r{number}", list(prompt), 4)


def test_second_request_hits_the_prefix_of_the_first() -> None:
    world = World()
    prompt = list(range(18))
    world.add(request("a", prompt, 2))
    world.run()
    world.add(request("b", [*prompt, 99], 2))
    world.run()
    expect(world, "b", [*prompt, 99], 2)
    assert world.scheduler.stats().prefix_hits == 16


@pytest.mark.parametrize(
    ("kind", "caches", "hashed"),
    [(Kind.LOCAL, False, 0), (Kind.LOCAL, True, 5), (Kind.SEND, False, 5), (Kind.RECEIVE, False, 5)],
)
def test_a_prompt_is_hashed_where_something_is_found_by_its_hashes(kind: Kind, caches: bool, hashed: int) -> None:
    world = World(prefix_caching=caches)
    sid = world.add(request("a", list(range(20)), 3), kind=kind, attempt="" if kind is Kind.LOCAL else "a")
    world.turn()
    assert len(world.scheduler.queues.live[sid].hashes) == hashed


def test_salted_prefixes_do_not_meet() -> None:
    world = World()
    prompt = list(range(18))
    for salt in ("x", "y"):
        req = request(salt, prompt, 2)
        world.add(type(req)(**{f: getattr(req, f) for f in req.__slots__} | {"cache_salt": salt}))
        world.run()
    assert world.scheduler.stats().prefix_hits == 0


def test_the_longest_admitted_request_finishes_and_one_more_token_is_refused() -> None:
    world = World(num_blocks=17, max_model_len=64)  # 16 usable blocks of 4 tokens
    prompt = list(range(63))
    world.add(request("fits", prompt, 1000))
    world.run()
    expect(world, "fits", prompt, 1000)
    with pytest.raises(NeverFits, match=r"64 tokens.*at most 63.*max_model_len 64"):
        world.add(request("over", list(range(64)), 1))


def test_a_request_whose_peak_exceeds_the_pool_is_refused_with_numbers() -> None:
    pool = BlockPool(5)
    scheduler = Scheduler(SchedulerConfig(), make_plan(5, 4, 64), pool)
    with pytest.raises(NeverFits, match=r"20 tokens needs 5 KV blocks, the pool has 4 usable"):
        scheduler.add(request("a", list(range(10)), 10), 0.0)
    scheduler.add(request("b", list(range(10)), 6), 0.0)


def test_preemption_recomputes_and_the_oldest_wins() -> None:
    world = World(num_blocks=13, max_model_len=48, max_batched_tokens=64, prefix_caching=False)
    for sid in "abc":
        world.add(request(sid, [ord(sid)] * 10, 30))
    world.run()
    for sid in "abc":
        expect(world, sid, [ord(sid)] * 10, 30)
    assert world.scheduler.stats().preemptions > 0
    assert list(world.ends) == ["a", "b", "c"]


def test_priority_goes_first() -> None:
    world = World(max_num_seqs=1)
    order: list[str] = []
    for sid, priority in (("late", 5), ("soon", 0), ("first", -1)):
        req = request(sid, [1, 2, 3], 2)
        world.add(type(req)(**{f: getattr(req, f) for f in req.__slots__} | {"priority": priority}))
    while world.scheduler.has_work:
        assert world.turn()
        order += [sid for sid, ends in world.ends.items() if ends and sid not in order]
    assert order == ["first", "soon", "late"]


@pytest.mark.parametrize("rows", [1, 4])
def test_urgent_requests_that_keep_coming_starve_nobody(rows: int) -> None:
    """Ten clients at the least priority, each with another request as soon as one ends, beside three patient ones."""
    world = World(max_num_seqs=rows)
    patient = [world.add(replace(request(sid, [1, 2, 3], 2), priority=p)) for sid, p in (("a", 5), ("b", 0), ("c", 5))]
    urgent = 0
    for _ in range(10):
        world.now += 0.001
        world.add(replace(request(f"u{urgent}", [4, 5], 2), priority=-(2**31)))
        urgent += 1
    most = EVERY * len(patient) + 2 * rows
    while not all(world.ends[sid] for sid in patient):
        assert sum(map(bool, world.ends.values())) <= most, f"{most} requests ended, but not all of the patient ones"
        before = sum(map(bool, world.ends.values()))
        assert world.turn()
        for _ in range(sum(map(bool, world.ends.values())) - before):
            world.add(replace(request(f"u{urgent}", [4, 5], 2), priority=-(2**31)))
            urgent += 1
    ended = [sid for sid, ends in world.ends.items() if ends]
    assert len(ended) > (EVERY - 1) * len(patient), "the urgent ones had most of the turns"


def test_a_flood_that_is_not_urgent_leaves_urgent_requests_most_turns() -> None:
    world = World(max_num_seqs=1)
    for number in range(50):
        world.now += 0.01
        world.add(replace(request(f"f{number}", [1, 2], 1), priority=1))
    world.now += 50.0
    for number in range(7):
        world.add(replace(request(f"u{number}", [4, 5], 1), priority=0))
    while not all(world.ends[f"u{number}"] for number in range(7)):
        assert world.turn()
    assert sum(bool(ends) for sid, ends in world.ends.items() if sid[0] == "f") <= 3


def test_stop_token_ends_the_request_and_the_step_in_flight_is_dropped() -> None:
    world = World()
    prompt = [5, 6, 7]
    tokens = expected_tokens(prompt, request("x", prompt, 1).sampling, 10)
    world.add(request("a", prompt, 10, stop_token_ids=(tokens[3],)))
    world.run()
    assert world.tokens["a"] == tokens[: tokens.index(tokens[3]) + 1]
    assert world.finish("a") is FinishReason.STOP


@pytest.mark.parametrize("turns", range(6))
def test_abort_is_valid_at_any_moment(turns: int) -> None:
    world = World(max_num_seqs=1)
    for sid in "ab":
        world.add(request(sid, list(range(20)), 4))
    for _ in range(turns):
        world.turn()
    for sid in "ab":
        world.take(world.scheduler.abort(sid, "", "left"))
    world.run()
    for sid in "ab":
        assert world.finish(sid) in (FinishReason.ABORT, FinishReason.LENGTH)
    world.scheduler.check()
    assert world.scheduler.abort("a", "", "again") == []
    assert world.scheduler.stats().unknown_events == 0, "an abort that finds nothing is no late message of a transfer"


def test_abort_by_attempt_finds_the_attempt_and_nothing_else() -> None:
    world = World()
    world.add(request("unnamed", [1, 2], 5))
    world.add(request("plain", [1, 2], 5), attempt="t2")
    world.add(request("moved", [1, 2], 5), kind=Kind.RECEIVE, attempt="t1")
    for request_id in ("moved", "plain", "unnamed"):
        assert world.scheduler.abort(request_id, "t0", "an earlier attempt, late") == []
    world.take(world.scheduler.abort("plain", "t2", "left"))
    world.take(world.scheduler.abort("moved", "t1", "left"))
    world.take(world.scheduler.abort("unnamed", "", "left"))
    assert [len(world.ends[sid]) for sid in ("t2", "t1", "unnamed")] == [1, 1, 1]


def test_a_second_word_about_a_failed_transfer_does_not_begin_the_recompute_again() -> None:
    world = World(num_blocks=9)
    world.add(request("r", [1, 2, 3, 4, 5], 4), kind=Kind.RECEIVE, attempt="t")
    world.turn()
    for _ in range(2):
        world.fail("t", TransferFailed("lost", stage="receiving", attempt="t"))
        world.scheduler.released("t", True)
        world.turn()
    world.run()
    expect(world, "t", [1, 2, 3, 4, 5], 4)
    assert world.scheduler.stats().recomputes == 1


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_a_failure_told_of_kv_that_has_arrived_changes_nothing(turns: int) -> None:
    world, prompt = World(), [1, 2, 3, 4, 5]
    world.add(request("r", prompt, 8), kind=Kind.RECEIVE, attempt="t")
    world.turn()
    (job,) = [e for e in world.effects if isinstance(e, OpenReceive)]
    fill(world, job, prompt)
    first = expected_tokens(prompt, request("r", prompt, 8).sampling, 1)[0]
    record = PrefillRecord(attempt="t", num_tokens=5, first_token=first, key_digest="", block_bytes=0)
    world.take(world.scheduler.received("t", record))
    world.scheduler.released("t", True)
    for _ in range(turns):
        world.turn()
    world.fail("t", TransferFailed("late", stage="prefill", attempt="t"))
    world.run()
    expect(world, "t", prompt, 8)
    stats = world.scheduler.stats()
    assert (stats.recomputes, stats.unknown_events) == (0, 1)


def test_waiting_request_ends_at_its_queue_deadline() -> None:
    world = World(max_num_seqs=1, num_blocks=17)
    world.add(request("runs", [1] * 8, 50))
    world.add(request("waits", [2] * 8, 50))
    world.turn()
    world.now = 200.0
    world.take(world.scheduler.tick(world.now))
    chunk = world.ends["waits"][0]
    assert isinstance(chunk.error, DeadlineExceeded)
    assert "waited" in chunk.error.message


def test_full_queue_and_duplicate_ids_are_refused() -> None:
    scheduler = Scheduler(SchedulerConfig(max_waiting=1), make_plan(33, 4, 64), BlockPool(33))
    scheduler.add(request("a", [1], 1), 0.0)
    with pytest.raises(InvalidRequest, match="already in progress"):
        scheduler.add(request("a", [1], 1), 0.0)
    with pytest.raises(Overloaded, match="max-waiting 1") as caught:
        scheduler.add(request("b", [1], 1), 0.0)
    assert caught.value.status == 429


def test_sliding_window_blocks_come_back_while_the_request_runs() -> None:
    world = World(num_blocks=9, max_num_seqs=2, max_batched_tokens=8, windows=(8,))
    world.add(request("a", list(range(20)), 40))
    world.run()
    assert world.finish("a") is FinishReason.LENGTH
    params = request("a", [], 40).sampling
    assert world.tokens["a"] == expected_tokens(list(range(20)), params, 40, (8,))


# -------------------------------------------------------------------------------------------------------- handoffs


def move(source: World, target: World, sent: SendBlocks | tuple[SendBlocks, ...], job: OpenReceive) -> None:
    """Copy the sent blocks into the reserved ones, as a transport would."""
    where = {(ref.group, ref.index): ref for ref in job.job.blocks}
    for effect in sent if isinstance(sent, tuple) else (sent,):
        for ref in effect.blocks:
            there = where.pop((ref.group, ref.index))
            assert there.key == ref.key
            target.executor.block_bytes(there.block_id)[:] = source.executor.block_bytes(ref.block_id)
    assert not where, f"not sent: {where}"


def in_order(sent: tuple[SendBlocks, ...]) -> list[BlockRef]:
    return sorted((ref for effect in sent for ref in effect.blocks), key=lambda ref: (ref.group, ref.index))


def prefill(world: World, sid: str, prompt: list[int], skip: int = 0) -> tuple[tuple[SendBlocks, ...], PrefillRecord]:
    world.add(request(sid, prompt, 9), kind=Kind.SEND, attempt=sid, skip_blocks=skip)
    world.scheduler.handoffs.open_send(sid)
    for _ in range(200):
        finish = [e for e in world.effects if isinstance(e, FinishSend) and e.attempt == sid]
        if finish:
            result = finish[0].result
            sent = tuple(e for e in world.effects if isinstance(e, SendBlocks) and e.attempt == sid)
            return sent, PrefillRecord(
                attempt=sid,
                num_tokens=result.num_tokens,
                first_token=result.first_token,
                key_digest=keys_digest([ref.key for ref in in_order(sent)]),
                block_bytes=0,
            )
        world.turn()
    raise AssertionError("prefill never finished")


@pytest.mark.parametrize("length", [1, 4, 15, 16, 17, 23])
def test_prefill_then_decode_equals_unified(length: int) -> None:
    prompt = [3 * i for i in range(length)]
    p, d = World(max_batched_tokens=5), World()
    d.add(request("t", prompt, 9), kind=Kind.RECEIVE, attempt="t")
    d.turn()
    (job,) = [e for e in d.effects if isinstance(e, OpenReceive)]
    sent, record = prefill(p, "t", prompt)
    assert record.key_digest == keys_digest([ref.key for ref in job.job.blocks])
    move(p, d, sent, job)
    assert p.scheduler.sent("t") is not None
    p.scheduler.released("t", True)
    p.scheduler.check()
    d.take(d.scheduler.received("t", record))
    d.scheduler.released("t", True)
    d.run()
    expect(d, "t", prompt, 9)
    d.scheduler.check()


def begin(world: World, sid: str, prompt: list[int], max_tokens: int = 9) -> None:
    """A prompt without its ticket."""
    world.add(request(sid, prompt, max_tokens), kind=Kind.SEND, attempt=sid)
    world.scheduler.begin_early(sid)


def give_ticket(world: World, sid: str, skip: int = 0) -> None:
    seq = world.scheduler.awaits_ticket(sid)
    assert seq is not None
    world.take(world.scheduler.give_ticket(seq, skip))


@pytest.mark.parametrize("turns", [0, 1, 2, 30])
def test_a_prompt_that_began_before_its_ticket_is_sent_as_any_other(turns: int) -> None:
    """`turns` before the ticket comes: none, some chunks, all."""
    prompt = [3 * i for i in range(22)]
    p, d = World(max_batched_tokens=5, depth=1), World()
    begin(p, "t", prompt)
    for _ in range(turns):
        p.turn()
    assert not [e for e in p.effects if isinstance(e, SendBlocks | FinishSend)]
    first = expected_tokens(prompt, request("x", [1], 1).sampling, 1)
    assert p.tokens["t"] == (first if turns == 30 else []), "told when it is known, whether there is a ticket or not"
    d.add(request("t", prompt, 9), kind=Kind.RECEIVE, attempt="t")
    d.turn()
    (job,) = [e for e in d.effects if isinstance(e, OpenReceive)]
    give_ticket(p, "t")
    for _ in range(30):
        p.turn()
    assert p.tokens["t"] == first
    sent = tuple(e for e in p.effects if isinstance(e, SendBlocks))
    (finish,) = [e for e in p.effects if isinstance(e, FinishSend)]
    assert p.effects.index(finish) > max(p.effects.index(e) for e in sent)
    move(p, d, sent, job)
    assert p.scheduler.sent("t") is not None
    p.scheduler.released("t", True)
    p.scheduler.check()
    assert not p.scheduler.has_work and p.scheduler.handoffs.idle()
    digest = keys_digest([ref.key for ref in in_order(sent)])
    result = finish.result
    record = PrefillRecord(attempt="t", num_tokens=22, first_token=result.first_token, key_digest=digest, block_bytes=0)
    d.take(d.scheduler.received("t", record))
    d.scheduler.released("t", True)
    d.run()
    expect(d, "t", prompt, 9)


@pytest.mark.parametrize("computed", [False, True])
def test_blocks_that_decode_has_are_not_sent_by_who_began_early(computed: bool) -> None:
    world = World(max_batched_tokens=16 if computed else 4, depth=1)
    begin(world, "t", list(range(22)))
    for _ in range(8 if computed else 1):
        world.turn()
    give_ticket(world, "t", skip=4)
    for _ in range(8):
        world.turn()
    sent = tuple(e for e in world.effects if isinstance(e, SendBlocks))
    assert [ref.index for ref in in_order(sent)] == [4, 5]
    assert sum(isinstance(e, FinishSend) for e in world.effects) == 1


@pytest.mark.parametrize("turns", [0, 1, 30])
@pytest.mark.parametrize("how", ["abort", "all"])
def test_a_prompt_that_ends_before_its_ticket_leaves_nothing(turns: int, how: str) -> None:
    """No transfer knows of it that could say that its blocks are free."""
    world = World(max_batched_tokens=5)
    begin(world, "t", list(range(22)))
    for _ in range(turns):
        world.turn()
    end = world.scheduler.abort("t", "t", "left") if how == "abort" else world.scheduler.abort_all(EngineFailed("x"))
    world.take(end)
    assert not [e for e in world.effects if isinstance(e, CancelAttempt)]
    assert world.scheduler.awaits_ticket("t") is None
    world.run()
    assert len(world.ends["t"]) == 1 and world.scheduler.handoffs.idle()
    world.scheduler.check()


def test_a_prompt_whose_ticket_does_not_come_gives_its_blocks_back() -> None:
    """Decode may wait for blocks that others hold until prefill has blocks for them."""
    world = World(num_blocks=8, max_model_len=28)
    begin(world, "t", list(range(22)))
    for _ in range(10):
        world.turn()
    world.add(request("waits", list(range(50, 72)), 2))
    for _ in range(50):
        world.turn()
    assert not world.ends["t"] and not world.tokens["waits"], "its blocks are kept for a moment"
    world.now += TICKET_S
    world.run()
    error = world.ends["t"][0].error
    assert isinstance(error, Overloaded) and "has not reserved within 1 s" in error.message
    expect(world, "waits", list(range(50, 72)), 2)


def test_a_first_token_that_is_the_last_is_decode_s_to_tell() -> None:
    prompt = list(range(9))
    stop = expected_tokens(prompt, request("x", [1], 1).sampling, 1)
    world = World()
    begin(world, "one", prompt, max_tokens=1)
    world.add(request("stop", prompt, 9, stop_token_ids=tuple(stop)), kind=Kind.SEND, attempt="stop")
    world.scheduler.begin_early("stop")
    for _ in range(10):
        world.turn()
    assert world.tokens == {"one": [], "stop": []}


@pytest.mark.parametrize("right", [True, False])
def test_a_recompute_goes_on_from_the_token_that_the_client_has(right: bool) -> None:
    """Prefill told it before its KV was lost; another one would be in the answer twice, or contradict it."""
    prompt = list(range(10))
    world = World()
    world.add(request("t", prompt, 4), kind=Kind.RECEIVE, attempt="t")
    world.turn()
    first = expected_tokens(prompt, request("x", [1], 1).sampling, 1)[0] + (not right)
    world.take(world.scheduler.committed("t", first))
    world.fail("t", TransferFailed("x", stage="sending", attempt="t"), alone=True)
    world.scheduler.released("t", True)
    world.run()
    rest = expected_tokens([*prompt, first], request("x", [1], 1).sampling, 3)
    assert world.tokens["t"] == [first, *rest]
    assert world.finish("t") is FinishReason.LENGTH
    assert world.scheduler.committed("t", first) == [], "late: nobody is harmed"


@pytest.mark.parametrize("told", [True, False])
def test_decode_that_loses_the_kv_by_itself_waits_for_the_token_that_the_client_has(told: bool) -> None:
    """It had drawn another one, where the router's word was still on its way, and the stream ended by an error."""
    prompt, error = list(range(10)), TransferFailed("x", stage="receiving", attempt="t")
    world = World()
    world.add(request("t", prompt, 4), kind=Kind.RECEIVE, attempt="t")
    world.turn()
    sampling = request("x", [1], 1).sampling
    first = expected_tokens(prompt, sampling, 1)[0] + told  # another engine may draw another one
    for _ in range(2):
        world.fail("t", error, alone=True)
    world.scheduler.released("t", True)
    for _ in range(20):
        world.turn()
    assert world.tokens["t"] == [] and world.pool.counts().owned == 0
    world.take(world.scheduler.committed("t", first if told else None))
    world.fail("t", error, alone=True)
    world.run()
    assert world.tokens["t"] == [first, *expected_tokens([*prompt, first], sampling, 3)]
    assert world.finish("t") is FinishReason.LENGTH
    stats = world.scheduler.stats()
    assert (stats.recomputes, stats.unknown_events) == (1, 2)


def test_nobody_waits_for_ever_for_the_router_s_word() -> None:
    world = World()
    world.add(request("t", [1, 2, 3], 4), kind=Kind.RECEIVE, attempt="t")
    world.add(request("gone", [1, 2, 3], 4), kind=Kind.RECEIVE, attempt="gone")
    world.turn()
    for sid in ("t", "gone"):
        world.fail(sid, TransferFailed("x", stage="receiving", attempt=sid), alone=True)
        world.scheduler.released(sid, True)
    world.take(world.scheduler.abort("gone", "gone", "left"))
    ends_at = world.scheduler.next_deadline()
    assert ends_at is not None
    world.now = ends_at
    world.run()
    expect(world, "t", [1, 2, 3], 4)
    assert world.finish("gone") is FinishReason.ABORT


def test_blocks_are_sent_while_the_prompt_is_still_computed() -> None:
    world = World(max_batched_tokens=4, depth=1)
    world.add(request("t", list(range(16)), 1), kind=Kind.SEND, attempt="t")
    world.scheduler.handoffs.open_send("t")
    world.turn()
    assert [ref.index for e in world.effects if isinstance(e, SendBlocks) for ref in e.blocks] == [0]
    (seq,) = world.scheduler.live()
    assert seq.phase is Phase.RUNNING


def test_local_prefix_hits_are_skipped() -> None:
    prompt = list(range(22))
    p, d = World(), World()
    d.add(request("warm", prompt[:16], 1))
    d.run()
    d.add(request("t", prompt, 4), kind=Kind.RECEIVE, attempt="t")
    d.turn()
    (job,) = [e for e in d.effects if isinstance(e, OpenReceive)]
    assert job.job.skip_blocks == 4
    assert [ref.index for ref in job.job.blocks] == [4, 5]
    sent, record = prefill(p, "t", prompt, skip=4)
    assert [ref.index for e in sent for ref in e.blocks] == [4, 5]
    move(p, d, sent, job)
    d.take(d.scheduler.received("t", record))
    d.scheduler.released("t", True)
    d.run()
    expect(d, "t", prompt, 4)


@pytest.mark.parametrize("drained", [True, False])
def test_failed_transfer_is_recomputed_and_its_blocks_are_quarantined_until_drained(drained: bool) -> None:
    world = World()
    prompt = list(range(10))
    world.add(request("t", prompt, 4), kind=Kind.RECEIVE, attempt="t")
    world.turn()
    (job,) = [e for e in world.effects if isinstance(e, OpenReceive)]
    ids = [ref.block_id for ref in job.job.blocks]
    world.fail("t", TransferFailed("lost", stage="sending", attempt="t"))
    world.scheduler.released("t", drained)
    assert {world.pool.state(b).name for b in ids} == ({"FREE"} if drained else {"QUARANTINED"})
    world.run()
    expect(world, "t", prompt, 4)
    if not drained:
        assert world.pool.counts().quarantined == len(ids)
        world.scheduler.drained("t")
    assert world.pool.counts().quarantined == 0
    world.scheduler.check()


def test_failed_transfer_ends_the_request_when_recompute_is_off() -> None:
    world = World()
    world.scheduler._recompute = False
    world.add(request("t", [1, 2, 3], 4), kind=Kind.RECEIVE, attempt="t")
    world.turn()
    world.fail("t", TransferFailed("lost", stage="sending", attempt="t"))
    error = world.ends["t"][0].error
    assert isinstance(error, TransferFailed)
    assert (error.stage, error.attempt) == ("sending", "t")


def test_abort_while_receiving_cancels_the_attempt_and_holds_the_blocks() -> None:
    world = World()
    world.add(request("r", list(range(10)), 4), kind=Kind.RECEIVE, attempt="t")
    world.turn()
    world.take(world.scheduler.abort("r", "t", "left"))
    assert [e for e in world.effects if isinstance(e, CancelAttempt)] == [CancelAttempt("t", "left")]
    assert world.pool.counts().writing == 3
    assert (
        world.scheduler.received(
            "t", PrefillRecord(attempt="t", num_tokens=10, first_token=1, key_digest="", block_bytes=0)
        )
        == []
    )
    world.scheduler.released("t", True)
    world.scheduler.check()
    assert world.pool.counts().writing == 0


def test_receiving_requests_hold_no_row_and_leave_running_ones_what_they_need_next() -> None:
    """One that runs goes on beside transfers that do not end, by an eighth of the pool here, then waits for them, and
    keeps what it has."""
    world = World(max_num_seqs=1, num_blocks=17)
    world.add(request("runs", list(range(8)), 40))
    world.turn()
    for i in range(4):
        world.add(request(f"t{i}", [i] * 12, 4), kind=Kind.RECEIVE, attempt=f"t{i}")
    while world.turn():
        pass
    jobs = [e for e in world.effects if isinstance(e, OpenReceive)]
    assert len(jobs) == 3, "those that were reserved beside what it may need next"
    told = len(world.tokens["runs"])
    assert told > 16 and world.scheduler.stats().preemptions == 0
    for i in range(4):
        world.fail(f"t{i}", TransferFailed("lost", stage="sending", attempt=f"t{i}"))
        world.scheduler.released(f"t{i}", True)
    world.run()
    expect(world, "runs", list(range(8)), 40)
    for i in range(4):
        expect(world, f"t{i}", [i] * 12, 4)


def test_what_an_answer_may_come_to_keeps_no_prompt_out() -> None:
    """Without `max_tokens` it may come to the whole pool, where the longest length was fitted to that."""
    world = World(num_blocks=65, max_model_len=256, max_num_seqs=4)
    world.add(request("long", list(range(8)), 248))
    world.turn()
    served = 0
    while len(world.tokens["long"]) < 170:
        sid, prompt = f"t{served}", [served % 50] * 30
        world.add(request(sid, prompt, 4), kind=Kind.RECEIVE, attempt=sid)
        assert receive(world, sid, prompt), f"{sid} was not reserved beside {len(world.tokens['long'])} tokens"
        while not world.ends[sid]:
            assert world.turn()
        expect(world, sid, prompt, 4)
        served += 1
    assert served > 20
    world.run()
    expect(world, "long", list(range(8)), 248)


def receive(world: World, sid: str, prompt: list[int], turns: int = 40) -> bool:
    """Have the prompt arrive as soon as blocks are reserved; whether they were, within so many turns."""
    for _ in range(turns):
        job = next((e for e in world.effects if isinstance(e, OpenReceive) and e.job.attempt == sid), None)
        if job is not None:
            fill(world, job, prompt)
            first = expected_tokens(prompt, request("x", [1], 1).sampling, 1)[0]
            record = PrefillRecord(attempt=sid, num_tokens=len(prompt), first_token=first, key_digest="", block_bytes=0)
            world.take(world.scheduler.received(sid, record))
            world.scheduler.released(sid, True)
            return True
        world.turn()
    return False


# ------------------------------------------------------------------------------------------------------ properties

requests = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2), st.integers(0, 12)), min_size=1, max_size=10
)


@given(
    work=requests,
    num_blocks=st.integers(6, 24),
    block_size=st.sampled_from([1, 2, 4, 8]),
    rows=st.integers(1, 5),
    budget=st.integers(1, 24),
    depth=st.integers(1, 2),
    caching=st.booleans(),
)
def test_whatever_is_admitted_finishes_with_the_right_tokens(
    work: list[tuple[int, int, int, int]],
    num_blocks: int,
    block_size: int,
    rows: int,
    budget: int,
    depth: int,
    caching: bool,
) -> None:
    max_len = (num_blocks - 1) * block_size
    world = World(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_len,
        max_num_seqs=rows,
        max_batched_tokens=budget,
        depth=depth,
        prefix_caching=caching,
    )
    admitted: dict[str, tuple[list[int], int]] = {}
    for number, (length, max_tokens, family, pause) in enumerate(work):
        prompt = [family * 100 + i for i in range(length)]
        sid = f"r{number}"
        try:
            world.add(request(sid, prompt, max_tokens))
        except NeverFits:
            assert length > max_len - 1
            continue
        admitted[sid] = (prompt, max_tokens)
        for _ in range(pause):
            world.turn()
    world.run(limit=20000)
    for sid, (prompt, max_tokens) in admitted.items():
        expect(world, sid, prompt, max_tokens)
    counts = world.pool.counts()
    assert counts.free + counts.cached == num_blocks - 1


@given(data=st.data())
def test_handoffs_in_any_order_leak_nothing_and_end_once(data: st.DataObject) -> None:
    """Adds, turns, arrivals, failures, aborts and releases in any order; then everything is released and drained."""
    world = World(num_blocks=data.draw(st.integers(8, 30)), max_num_seqs=2, prefix_caching=data.draw(st.booleans()))
    prompts: dict[str, list[int]] = {}
    open_legs: dict[str, OpenReceive] = {}
    settled: set[str] = set()
    quarantined: set[str] = set()
    for number in range(data.draw(st.integers(1, 25))):
        for effect in world.effects:
            if isinstance(effect, OpenReceive):
                open_legs[effect.job.attempt] = effect
        world.effects.clear()
        match data.draw(st.sampled_from(["add", "turn", "turn", "arrive", "fail", "abort", "release", "drain"])):
            case "add":
                sid = f"t{number}"
                prompt = [data.draw(st.integers(0, 1)) * 50 + i for i in range(data.draw(st.integers(1, 20)))]
                kind = data.draw(st.sampled_from([Kind.LOCAL, Kind.RECEIVE]))
                attempt = sid if kind is Kind.RECEIVE else ""
                try:
                    world.add(request(sid, prompt, 5), kind=kind, attempt=attempt)
                    prompts[sid] = prompt
                except NeverFits:
                    pass
            case "turn":
                world.turn()
            case "arrive" if open_legs.keys() - settled:
                sid = data.draw(st.sampled_from(sorted(open_legs.keys() - settled)))
                fill(world, open_legs[sid], prompts[sid])
                first = expected_tokens(prompts[sid], request("x", [1], 1).sampling, 1)[0]
                record = PrefillRecord(attempt=sid, num_tokens=1, first_token=first, key_digest="", block_bytes=0)
                world.take(world.scheduler.received(sid, record))
                settled.add(sid)
                world.scheduler.released(sid, True)
                open_legs.pop(sid)
            case "fail" if open_legs.keys() - settled:
                sid = data.draw(st.sampled_from(sorted(open_legs.keys() - settled)))
                world.fail(sid, TransferFailed("x", stage="s", attempt=sid), alone=data.draw(st.booleans()))
                settled.add(sid)
            case "abort" if prompts:
                sid = data.draw(st.sampled_from(sorted(prompts)))
                world.take(world.scheduler.abort(sid, "", "left"))
            case "release" if settled & open_legs.keys():
                sid = data.draw(st.sampled_from(sorted(settled & open_legs.keys())))
                drained = data.draw(st.booleans())
                world.scheduler.released(sid, drained)
                open_legs.pop(sid)
                if not drained:
                    quarantined.add(sid)
            case "drain" if quarantined:
                world.scheduler.drained(quarantined.pop())
            case _:
                pass
        world.scheduler.check()
    for sid in prompts:
        world.take(world.scheduler.committed(sid, None))
    for sid in list(prompts):
        if not world.ends[sid] and sid in open_legs and sid not in settled:
            world.fail(sid, TransferFailed("x", stage="s", attempt=sid))
    for effect in world.effects:
        if isinstance(effect, OpenReceive):
            open_legs[effect.job.attempt] = effect
    for _ in range(3000):
        for effect in [e for e in world.effects if isinstance(e, OpenReceive)]:
            sid = effect.job.attempt
            world.effects.remove(effect)
            world.fail(sid, TransferFailed("x", stage="s", attempt=sid))
            world.scheduler.released(sid, True)
            open_legs.pop(sid, None)
        for sid in list(open_legs):
            world.fail(sid, TransferFailed("x", stage="s", attempt=sid))
            world.scheduler.released(sid, True)
            open_legs.pop(sid)
        for sid in list(quarantined):
            world.scheduler.drained(sid)
            quarantined.discard(sid)
        if not world.scheduler.has_work:
            break
        world.turn()
    assert not world.scheduler.has_work, list(world.scheduler.live())
    for sid, prompt in prompts.items():
        if world.finish(sid) is FinishReason.LENGTH:
            expect(world, sid, prompt, 5)
    world.scheduler.check()
    counts = world.pool.counts()
    assert counts.owned == counts.writing == counts.quarantined == 0


def fill(world: World, job: OpenReceive, prompt: list[int]) -> None:
    """Write what a right prefill would have written."""
    from isthmus_runtime.executor.fake import _ENTRY, ENTRY_BYTES

    bs = world.block_size
    for ref in job.job.blocks:
        view = world.executor.block_bytes(ref.block_id)
        for position in range(ref.index * bs, min((ref.index + 1) * bs, len(prompt))):
            _ENTRY.pack_into(view, position % bs * ENTRY_BYTES, prompt[position], position)


class EvenAfterOdd:
    """Token ids of the other parity than the token before; the first is free. Counts how often it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def allowed(self, generated: Sequence[int]) -> bytes | None:
        self.asked.append(len(generated))
        return None if not generated else (b"\x55" if generated[-1] % 2 else b"\xaa") * 124

    def forced(self, generated: Sequence[int], most: int) -> Forced:
        return Forced()


class Sync:
    """`Masks` of a rule, computed by whoever asks; a late one never comes in time."""

    def __init__(self, rule: EvenAfterOdd) -> None:
        self.rule = rule
        self.dropped = 0
        self.newest: tuple[int, bytes | None] = (-1, None)

    def allowed(self, generated: Sequence[int], most: int = 0) -> bytes | None:
        if self.newest[0] != len(generated):
            self.newest = len(generated), self.rule.allowed(generated)
        return self.newest[1]

    def forced(self) -> Forced:
        return Forced()

    def late(self, count: int) -> Sync:
        return self

    def wait(self, patience_s: float) -> Later:
        return Later.MASK

    def drop(self) -> None:
        self.dropped += 1


def test_a_constrained_row_waits_for_its_token_and_the_others_do_not() -> None:
    world = World()
    rule = EvenAfterOdd()
    world.add(request("masked", [1, 2, 3], 9), masks=Sync(rule))
    world.add(request("free", [4, 5, 6], 9))
    ahead = 0
    while world.scheduler.has_work:
        seqs = {seq.sid: seq for seq in world.scheduler.live()}
        if world.scheduler.in_flight == 1 and "masked" in seqs and "free" in seqs:
            assert seqs["masked"].unseen <= 1
            ahead += seqs["free"].unseen > seqs["masked"].unseen
        assert world.turn()
        assert all(seq.unseen <= 1 for seq in world.scheduler.live() if seq.sid == "masked")
    tokens = world.tokens["masked"]
    assert len(tokens) == 9 and all((a + b) % 2 for a, b in itertools.pairwise(tokens))
    assert rule.asked == list(range(9))
    params = SamplingParams(max_tokens=9, temperature=0.0)
    assert world.tokens["free"] == expected_tokens([4, 5, 6], params, 9)


class InTime(Sync):
    """The same, and a late one is there once its token was seen."""

    def late(self, count: int) -> Late:
        return Late(self, count)


class Late:
    def __init__(self, masks: Sync, count: int) -> None:
        self.masks, self.count = masks, count

    def wait(self, patience_s: float) -> bytes | None:
        assert self.masks.newest[0] == self.count, "the mask was not asked for before its step"
        return self.masks.newest[1]


def test_a_row_with_late_masks_is_in_every_step() -> None:
    world = World(late_masks=True)
    masks = InTime(EvenAfterOdd())
    world.add(request("masked", [1, 2, 3], 9), masks=masks)
    world.add(request("free", [4, 5, 6], 9))
    plans = []
    while world.scheduler.has_work:
        if len(plans) < 2:
            plan, effects = world.scheduler.schedule(world.now)
            world.take(effects)
            if plan is not None:
                plans.append(plan)
                assert len(plan.chunks) == 2 and len(plan.masks) + len(plan.late_masks) <= 1
                continue
        # Each step draws when the one before it was seen, as a device does that computes ahead.
        world.take(world.scheduler.complete(world.executor.run(plans.pop(0)), world.now))
    tokens = world.tokens["masked"]
    assert len(tokens) == 9 and all((a + b) % 2 for a, b in itertools.pairwise(tokens))
    assert masks.rule.asked == list(range(9))
    assert world.tokens["free"] == expected_tokens([4, 5, 6], SamplingParams(max_tokens=9, temperature=0.0), 9)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_draw_whose_mask_did_not_come_is_repeated(prefix_caching: bool) -> None:
    world = World(late_masks=True, max_model_len=128, num_blocks=65, prefix_caching=prefix_caching)
    masks = Sync(EvenAfterOdd())
    world.add(request("masked", [1, 2, 3], 80), masks=masks)
    world.add(request("free", [4, 5, 6], 100))
    world.run()
    tokens = world.tokens["masked"]
    assert len(tokens) == 80 and all((a + b) % 2 for a, b in itertools.pairwise(tokens))
    params = SamplingParams(max_tokens=100, temperature=0.0)
    assert world.tokens["free"] == expected_tokens([4, 5, 6], params, 100)
    # Each miss is followed by a while without late masks, of 2, 4, 8, 16, 32 and 32 tokens; the last drop is the end.
    assert masks.dropped == 1 + 6


@pytest.mark.parametrize("late_masks", [False, True])
def test_a_constrained_request_goes_on_right_after_a_preemption(late_masks: bool) -> None:
    world = World(num_blocks=10, prefix_caching=False, late_masks=late_masks)
    world.add(request("older", [7] * 8, 20))
    world.add(request("masked", [1, 2, 3, 4], 12), masks=Sync(EvenAfterOdd()))
    world.run()
    assert world.scheduler.stats().preemptions
    tokens = world.tokens["masked"]
    assert len(tokens) == 12 and all((a + b) % 2 for a, b in itertools.pairwise(tokens))


def test_decode_goes_on_with_forced_tokens_after_a_transfer() -> None:
    """Prefill draws the first token, which forces others; decode computes those together."""
    prompt = [1, 2, 3, 4, 5]
    whole = World(max_model_len=128, num_blocks=65)
    whole.add(request("t", prompt, 60), masks=Stretches(tells=False))
    whole.run()
    p, d = World(), World(max_model_len=128, num_blocks=65)
    d.add(request("t", prompt, 60), kind=Kind.RECEIVE, attempt="t", masks=Stretches(tells=True))
    d.turn()
    (job,) = [effect for effect in d.effects if isinstance(effect, OpenReceive)]
    sent, record = prefill(p, "t", prompt)
    move(p, d, sent, job)
    d.take(d.scheduler.received("t", record))
    d.run()
    assert d.tokens["t"] == whole.tokens["t"] and d.scheduler.stats().forced > 10
    assert d.scheduler.steps.newest < whole.scheduler.steps.newest


# ------------------------------------------------------------------------------------------------ kinds of KV groups

KINDS: dict[str, Windows] = {"full": (None,), "sliding": (6,), "hybrid": (None, 6), "three": (9, None, 3)}


def disaggregated(prompt: list[int], count: int, p: World, d: World, sid: str = "t") -> None:
    """Prefill on one engine, decode on the other: all that decode waits for must come, and be enough."""
    d.add(request(sid, prompt, count), kind=Kind.RECEIVE, attempt=sid)
    d.turn()
    jobs = [e for e in d.effects if isinstance(e, OpenReceive) and e.job.attempt == sid]
    assert jobs, f"decode took a prompt of {len(prompt)} tokens and reserved nothing: {d.pool.counts()}"
    sent, record = prefill(p, sid, prompt, skip=jobs[0].job.skip_blocks)
    assert record.key_digest == keys_digest([ref.key for ref in jobs[0].job.blocks])
    move(p, d, sent, jobs[0])
    assert p.scheduler.sent(sid) is not None
    p.scheduler.released(sid, True)
    p.run()
    d.take(d.scheduler.received(sid, record))
    d.scheduler.released(sid, True)
    d.run()


@pytest.mark.parametrize("windows", KINDS.values(), ids=KINDS)
def test_who_got_its_kv_from_a_peer_guesses_as_any_other(windows: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [(7 * i) % 50 for i in range(23)]
    answer = expected_tokens(prompt, SamplingParams(max_tokens=30, temperature=0.0), 40, windows)

    class Knows(Drafter):
        """Every third guess is wrong."""

        def watch(self, tokens: Sequence[int]) -> bool:
            return True

        def judge(self, right: bool) -> None:
            self.trust = 1.0

        def guess(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
            at = len(tokens) - len(prompt)
            return tuple(t + (i % 3 == 2) for i, t in enumerate(answer[at : at + count], at))

    monkeypatch.setattr(drafts, "Drafter", Knows)
    p = World(num_blocks=120, max_model_len=128, max_batched_tokens=5, windows=windows, speculative_tokens=5)
    d = World(num_blocks=120, max_model_len=128, windows=windows, speculative_tokens=5)
    disaggregated(prompt, 30, p, d)
    assert d.tokens["t"] == answer[:30]
    assert d.scheduler.stats().accepted >= 10 and not p.scheduler.stats().drafted


@pytest.mark.parametrize("windows", KINDS.values(), ids=KINDS)
def test_every_kind_of_group_is_handed_over_as_one_engine_would_have_it(windows: Windows) -> None:
    p = World(num_blocks=120, max_model_len=128, max_batched_tokens=5, windows=windows)
    d = World(num_blocks=120, max_model_len=128, windows=windows)
    for number, length in enumerate((1, 4, 5, 6, 15, 16, 17, 40, 41, 60)):
        prompt = [3 * i + number % 3 for i in range(length)]  # some begin alike: local hits on either side
        disaggregated(prompt, 9, p, d, f"t{number}")
        params = request("", prompt, 9).sampling
        assert d.tokens[f"t{number}"] == expected_tokens(prompt, params, 9, windows)
    for world in (p, d):
        world.scheduler.check()
    assert d.scheduler.stats().prefix_hits and p.scheduler.stats().prefix_hits


@pytest.mark.parametrize("windows", KINDS.values(), ids=KINDS)
@given(usable=st.integers(4, 40), budget=st.integers(1, 24), length=st.integers(1, 150), count=st.integers(1, 30))
def test_what_is_admitted_finishes_in_every_role(
    windows: Windows, usable: int, budget: int, length: int, count: int
) -> None:
    """A lone request that an engine takes must not need more blocks than the pool has, ever."""

    def world() -> World:
        return World(num_blocks=usable + 1, max_model_len=200, max_batched_tokens=budget, windows=windows)

    prompt = [i * 7 % 90 for i in range(length)]
    params = request("", prompt, count).sampling
    right = expected_tokens(prompt, params, min(count, 200 - length), windows)
    local, p, d = world(), world(), world()
    try:
        local.add(request("a", prompt, count))
    except NeverFits:
        return
    local.run()
    assert local.tokens["a"] == right
    disaggregated(prompt, count, p, d)
    assert d.tokens["t"] == right


def test_a_windowed_receiver_reserves_its_window_and_holds_nobody_up() -> None:
    """Found in review: a prompt of 50 blocks, 11 in the pool, and a receiver that waited for all of them."""
    world = World(num_blocks=12, max_model_len=256, max_batched_tokens=8, windows=(6,))
    world.add(request("r", list(range(200)), 4), kind=Kind.RECEIVE, attempt="t")
    world.add(request("behind", [1, 2, 3], 4))
    world.turn()
    (job,) = [e for e in world.effects if isinstance(e, OpenReceive)]
    assert [(ref.group, ref.index) for ref in job.job.blocks] == [(0, 48), (0, 49)]
    while not world.ends["behind"]:
        assert world.turn()


@pytest.mark.parametrize("windows", KINDS.values(), ids=KINDS)
@settings(max_examples=12)
@given(sizes=st.lists(st.integers(1, 100), min_size=2, max_size=5), spare=st.integers(0, 12), budget=st.integers(1, 9))
def test_an_engine_that_only_prefills_preempts_nobody(
    windows: Windows, sizes: list[int], spare: int, budget: int
) -> None:
    """What was promised at admission is kept until the prompt is computed, also where windows give blocks back."""
    world = World(num_blocks=500, max_model_len=120, max_batched_tokens=budget, windows=windows, prefix_caching=False)
    world.scheduler.pool.allocate(499 - world.scheduler.blocks.peak(101) - spare)
    for number, size in enumerate(sizes):
        world.add(request(f"r{number}", [number] * size, 1), kind=Kind.SEND, attempt=f"r{number}")
        world.scheduler.handoffs.open_send(f"r{number}")
    finished: set[str] = set()
    for _ in range(2000):
        done = {e.attempt for e in world.effects if isinstance(e, FinishSend)} - finished
        for sid in done:
            assert world.scheduler.sent(sid) is not None
            world.scheduler.released(sid, True)
        finished |= done
        if len(finished) == len(sizes):
            break
        world.turn()
    assert len(finished) == len(sizes)
    assert world.scheduler.stats().preemptions == 0
