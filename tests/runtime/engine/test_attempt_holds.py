"""What an attempt keeps out of circulation after its request has ended. Found by the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_world import World, request
from timed_engine import TimedEngine

from isthmus_runtime.engine.loop import EngineLoop
from isthmus_runtime.engine.sequence import Kind, OpenReceive, SendBlocks
from isthmus_runtime.errors import DeadlineExceeded, InvalidRequest, TransferFailed
from isthmus_runtime.executor.fake import expected_tokens
from isthmus_runtime.interfaces.handoff import Failed, Released

FAILED = TransferFailed("lost", stage="sending", attempt="t")


def sending(world: World) -> list[int]:
    """A prefill that has handed its blocks over; their ids."""
    world.add(request("r", list(range(10)), 1), kind=Kind.SEND, attempt="t")
    world.scheduler.handoffs.open_send("t")
    while not world.effects:
        world.turn()
    for _ in range(10):
        world.turn()
    return [ref.block_id for effect in world.effects if isinstance(effect, SendBlocks) for ref in effect.blocks]


def test_a_sender_keeps_its_reader_leases_until_its_transfer_is_drained() -> None:
    world = World(prefix_caching=False)
    ids = sending(world)
    world.fail("t", FAILED)
    world.scheduler.released("t", False)
    assert {world.pool.state(block).name for block in ids} == {"OWNED"}, "late reads would send somebody else's KV"
    world.scheduler.check()
    world.scheduler.drained("t")
    assert {world.pool.state(block).name for block in ids} == {"FREE"}
    world.scheduler.check()


def test_a_repeated_call_cannot_take_over_what_an_ended_attempt_still_holds() -> None:
    world = World(prefix_caching=False)
    sending(world)
    world.fail("t", FAILED)
    for kind in (Kind.SEND, Kind.RECEIVE):
        with pytest.raises(InvalidRequest, match="already in progress"):
            world.scheduler.add(request("r", [1, 2, 3], 1), world.now, kind=kind, attempt="t")
    world.scheduler.released("t", True)
    world.scheduler.add(request("r", [1, 2, 3], 1), world.now, kind=Kind.RECEIVE, attempt="t")


def test_what_a_client_gave_up_is_neither_a_failed_transfer_nor_late() -> None:
    world = World(prefix_caching=False)
    loop = EngineLoop(world.scheduler, world.executor, lambda replies: None, clock=lambda: world.now)
    sending(world)
    world.take(world.scheduler.abort("r", "", "the client left"))
    loop.exchange.heard(Failed(attempt="t", stage="sending", reason="the client left", given_up=True), world.now)
    loop.exchange.heard(Released(attempt="t", drained=True), world.now)
    assert not loop.exchange.transfer_failures and world.scheduler.stats().unknown_events == 0
    # Decode gave up while prefill still computes: the request ends here too, and no transfer failed.
    sending(world)
    loop.exchange.heard(Failed(attempt="t", stage="sending", reason="decode left", given_up=True), world.now)
    assert loop.exchange.transfer_failures.total() == 0 and "t" not in world.scheduler.queues.live
    loop.exchange.heard(Released(attempt="t", drained=True), world.now)
    sending(world)
    loop.exchange.heard(Failed(attempt="t", stage="sending", reason="cut"), world.now)
    assert loop.exchange.transfer_failures == {"sending": 1}


@pytest.mark.parametrize("answer", [True, False])
def test_an_abort_whose_caller_is_gone_says_nothing_to_the_next_user_of_the_id(answer: bool) -> None:
    world = World()
    replies: list[object] = []
    loop = EngineLoop(world.scheduler, world.executor, replies.extend, clock=lambda: world.now)
    loop.generate(request("r", [1, 2, 3], 5))
    loop.abort("r", "", "the client disconnected", answer=answer)
    loop.turn()
    assert len(replies) == answer
    assert not world.scheduler.has_work


def test_the_loop_knows_when_it_must_wake() -> None:
    engine = TimedEngine(lambda plan: 0.001)
    loop = engine.loop
    assert loop.wakes_at() is None
    loop.generate(request("r", [1, 2, 3], 2))
    assert loop.wakes_at() == engine.now
    loop.turn()
    assert loop.wakes_at() == engine.now, "there may be a second step to plan"
    loop.turn()
    deadline = engine.scheduler.next_deadline()
    assert loop.wakes_at() == min(deadline, engine.now + 120.0), "two steps are in flight"
    engine.executor.finish()
    assert loop.wakes_at() == engine.now, "a step has ended"
    engine.run()
    assert loop.wakes_at() is None


def test_a_reservation_to_which_no_prefill_writes_ends_with_its_request_s_time() -> None:
    """A router that reserves on decode and then forgets about it, with its connection open."""
    world = World(prefix_caching=False)
    sid = world.add(replace(request("r", list(range(10)), 1), timeout_s=5.0), kind=Kind.RECEIVE, attempt="t")
    for _ in range(10):
        world.turn()
    assert any(isinstance(effect, OpenReceive) for effect in world.effects) and not world.ends[sid]
    free = world.pool.counts().free
    while world.now < 4.9:
        world.turn()
    assert not world.ends[sid]
    world.now = 5.1
    world.turn()
    (end,) = world.ends[sid]
    assert isinstance(end.error, DeadlineExceeded)
    assert world.pool.counts().free == free, "nobody has said yet that nothing is written any more"
    world.scheduler.released("t", True)
    assert world.pool.counts().free == world.num_blocks - 1
    world.scheduler.check()


def quarantined(world: World) -> list[str]:
    """An answer runs, and beside it blocks that a peer may still write: of these attempts."""
    world.add(request("long", [1, 2, 3, 4], 250))
    for _ in range(20):
        world.turn()
    for i in range(6):
        world.add(request(f"t{i}", [i + 5] * 20, 4), kind=Kind.RECEIVE, attempt=f"t{i}")
    for _ in range(20):
        world.turn()
    attempts = [effect.job.attempt for effect in world.effects if isinstance(effect, OpenReceive)]
    for attempt in attempts:
        world.take(world.scheduler.abort(attempt, attempt, "the client has left"))
        world.scheduler.released(attempt, False)
    return attempts


def test_an_answer_waits_for_blocks_of_a_peer_that_stands_still() -> None:
    """It has begun, and is none of that peer's: it ended with an error."""
    world = World(num_blocks=65, max_model_len=256)
    attempts = quarantined(world)
    while world.turn():
        pass
    told = len(world.tokens["long"])
    assert attempts and not world.ends["long"] and world.pool.counts().free == 0
    for attempt in attempts:
        world.scheduler.drained(attempt)
    world.run()
    assert len(world.tokens["long"]) == 250 > told
    assert world.tokens["long"] == expected_tokens([1, 2, 3, 4], request("x", [1], 1).sampling, 250)
    assert world.scheduler.stats().preemptions == 0


def test_an_answer_waits_no_longer_than_it_has_time() -> None:
    world = World(num_blocks=65, max_model_len=256)
    quarantined(world)
    while not world.ends["long"]:
        if not (world.turn() or world.ends["long"]):
            due = world.scheduler.next_deadline()
            assert due is not None
            world.now = due
    (end,) = world.ends["long"]
    assert isinstance(end.error, DeadlineExceeded)
