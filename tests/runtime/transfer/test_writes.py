"""The order of what one operation submits, and what stops it; what one raises is no other's matter."""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import Any, cast

import pytest

from isthmus_runtime.interfaces.transport import TransferResult
from isthmus_runtime.transfer import sockets
from isthmus_runtime.transfer.native_engine import DONE, POLL_S
from isthmus_runtime.transfer.peer_memory import Batch
from isthmus_runtime.transfer.peers import Peer, Peers
from isthmus_runtime.transfer.pool_jobs import Master, PoolJobs
from isthmus_runtime.transfer.transport import FAILED, MOVING, Run
from isthmus_runtime.transfer.writes import BUSY_S, IDLE_POLL_S, SOON_POLL_S, SOON_S, Write, Writes

BLOCKS = [Run(0, 64, 32), Run(128, 192, 32)]
RECORD = Run(4096, 8192, 100)


def write(record: Run | None = RECORD) -> Write:
    return Write(
        attempt="a",
        peer=Peer("127.0.0.1:1", "127.0.0.1:2", "decode"),
        claim=b"",
        runs=deque(BLOCKS),
        record=record,
        done=lambda _: None,
        over=lambda: None,
        timeout_s=1.0,
        deadline=1.0,
    )


def test_the_record_waits_for_the_last_block() -> None:
    op = write()
    for number, block in enumerate(BLOCKS):
        assert op.pop() == block
        op.flying[number] = block
    assert op.pop() is None and op.waiting, "blocks are on their way"
    del op.flying[0]
    assert op.pop() is None and op.waiting
    del op.flying[1]
    assert op.pop() is RECORD and not op.waiting
    assert op.pop() is None, "once"


def test_without_a_record_nothing_follows_the_blocks() -> None:
    op = write(None)
    assert [op.pop(), op.pop(), op.pop()] == [*BLOCKS, None]
    assert not op.waiting


def test_what_is_stopped_submits_nothing_and_keeps_its_first_problem() -> None:
    op = write()
    op.flying[0] = BLOCKS[0]
    op.stop("a write failed")
    op.stop("cancelled")
    del op.flying[0]
    assert op.pop() is None and not op.waiting, "no record after a failure"
    assert op.problem == "a write failed"


def test_what_is_short_is_looked_at_more_often_and_never_for_long() -> None:
    now = 10.0
    writes = Writes(cast(Peers, Willing()), lambda: now)
    parts = cast(Any, writes)
    parts._moved_at = now
    op = write()
    parts._ops.append(op)
    assert op.record is not None
    op.flying[1] = op.record
    op.flying[2] = Batch((BLOCKS[0],), 32)
    assert parts._pause() == SOON_POLL_S < POLL_S
    now += SOON_S
    assert parts._pause() == POLL_S, "something holds it up"
    now += BUSY_S
    assert parts._pause() == IDLE_POLL_S
    parts._moved_at = now
    other = write()
    parts._ops.append(other)
    other.flying[3] = BLOCKS[1]
    assert parts._pause() == POLL_S, "a block over a network takes its time"


class Engine:
    """Of TransferEngine: every transfer ends well, but for those whose state cannot be told."""

    def __init__(self, unknown: bool = False) -> None:
        self.unknown = unknown

    def transfer_submit_write(self, *_: object) -> int:
        return 7

    def transfer_check_status(self, _: int) -> int:
        if self.unknown:
            raise RuntimeError("no such transfer")
        return DONE


class Willing:
    """Peers that are always there."""

    def expect(self, attempt: str) -> None: ...

    def doubt(self, peer: Peer) -> None: ...

    def may_write(self, peer: Peer, attempt: str) -> bool:
        return True


def ended(writes: Writes, op: Write) -> TransferResult:
    """Its one result."""
    results: SimpleQueue[TransferResult] = SimpleQueue()
    told, op.done = op.done, lambda result: (results.put(result), told(result))[0]  # type: ignore[func-returns-value]
    writes.submit(op)
    found = results.get(timeout=20)
    assert results.empty()
    return found


def test_what_one_operation_raises_ends_no_other() -> None:
    def fails(*_: object) -> None:
        raise ValueError("of a callback")

    engine = Engine()
    writes = Writes(cast(Peers, Willing()), time.monotonic)
    writes.start(engine)
    try:
        first = write(None)
        first.deadline, first.done, first.over = time.monotonic() + 60, fails, fails
        assert ended(writes, first).ok
        writes.call(fails)
        engine.unknown = True
        lost = write(None)
        lost.attempt, lost.deadline = "lost", time.monotonic() + 60
        result = ended(writes, lost)
        assert not result.ok and not result.settled and "no such transfer" in result.reason
        engine.unknown = False
        last = write()
        last.attempt, last.deadline = "last", time.monotonic() + 60
        assert ended(writes, last).ok
        assert writes.moving("lost"), "nobody knows what it does"
        assert not writes.moving("last")
    finally:
        assert not writes.close(20), "and it may still read this process's memory"


@pytest.mark.parametrize("end", [DONE, FAILED])
def test_close_waits_for_what_is_in_flight_and_submits_nothing_more(end: int) -> None:
    """Its memory is given back after that."""

    class Slow(Engine):
        submitted = 0
        status = MOVING

        def transfer_submit_write(self, *_: object) -> int:
            self.submitted += 1
            flies.set()
            return self.submitted

        def transfer_check_status(self, _: int) -> int:
            return self.status

    flies, engine = threading.Event(), Slow()
    peers = cast(Peers, Willing())
    writes = Writes(peers, time.monotonic)
    writes.start(engine)
    op = write()
    op.deadline = time.monotonic() + 60
    writes.submit(op)
    assert flies.wait(20)
    assert not writes.close(0.05)
    engine.status = end
    assert writes.close(20)
    assert engine.submitted == len(BLOCKS), "no record follows"


def test_where_the_kernel_cannot_be_asked_bytes_may_be_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: str) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    assert not sockets.stuck_bytes_to("127.0.0.9")
    monkeypatch.setattr(sockets, "parse_table", full)
    assert sockets.stuck_bytes_to("127.0.0.9")


def test_a_job_of_the_pool_whose_callback_fails_ends_no_thread() -> None:
    def fails(*_: object) -> None:
        raise ValueError("of a callback")

    class Here:
        def problem(self) -> str:
            return ""

    jobs = PoolJobs(cast(Master, Here()), time.monotonic)
    jobs.start([[]])
    try:
        told: SimpleQueue[bool] = SimpleQueue()
        good = TransferResult(ok=True, moved_bytes=0)
        jobs.submit("a", lambda _: good, 60.0, fails, with_slot=False)
        jobs.later(0.0, fails)
        jobs.submit("b", lambda _: good, 60.0, lambda result: told.put(result.ok), with_slot=False)
        assert told.get(timeout=20)
        jobs.later(0.0, lambda: told.put(True))
        assert told.get(timeout=20)
    finally:
        assert jobs.close(20)
