"""The order of what one operation submits, and what stops it. Pure."""

from __future__ import annotations

from collections import deque

from isthmus_runtime.transfer.peers import Peer
from isthmus_runtime.transfer.transport import Run
from isthmus_runtime.transfer.writes import Write

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
