"""The thread of Direct transfers: what one peer says, or when it says it, is no matter to other transfers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from isthmus_runtime.interfaces.transport import KvRegion, Piece, TransferResult
from isthmus_runtime.protocol.calls import PrefillCall
from isthmus_runtime.protocol.ticket import Ticket
from isthmus_runtime.transfer import direct as module
from isthmus_runtime.transfer import peers
from isthmus_runtime.transfer.backend import Effective
from isthmus_runtime.transfer.direct import DirectTransfer
from isthmus_runtime.transfer.drain import Answer
from isthmus_runtime.transfer.native_engine import NativeEngine

WAIT_S = 20.0
TICKET = Ticket(
    mode="direct",
    attempt="a",
    layout_digest="d",
    session="127.0.0.1:1",
    greeting="127.0.0.1:2/word",
    epoch="decode",
    pool_base=1 << 20,
    block_stride=64,
    record_address=1 << 16,
    record_capacity=8192,
)
PIECE = Piece(block_id=1, key="k", nbytes=64, remote_address=1 << 20)


class _Run:
    """A transfer whose thread runs over a TransferEngine that takes every address of 64 bits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()
        """Of attempt "late": the others are answered at once."""
        monkeypatch.setattr(peers, "greeting_problem", self._greet)
        self.transfer = DirectTransfer(host="127.0.0.1", epoch="prefill")
        parts: Any = self.transfer
        engine = SimpleNamespace(
            transfer_submit_write=self._write, transfer_check_status=lambda _: 1, unregister_memory=lambda _: None
        )
        parts._native = NativeEngine(engine, "127.0.0.1:3", frozenset(), Effective("tcp", 0.0))
        parts._region = KvRegion(base=4096, num_blocks=4, block_bytes=64, block_stride=64, layout_digest="d")
        parts._writes.start(engine)

    def _greet(self, address: str, claim: bytes, *_: object) -> str:
        if not claim.endswith(b" late"):
            return ""
        self.asked.set()
        return "" if self.answers.wait(WAIT_S) else "the test has left"

    def _write(self, session: str, source: int, target: int, nbytes: int) -> int:
        if target >= 2**64:
            raise TypeError("incompatible function arguments")  # as Mooncake's binding
        return 7

    def write(
        self, attempt: str, piece: Piece = PIECE, then: Callable[[], object] = lambda: None
    ) -> Callable[[], TransferResult]:
        """Begin one; call what comes back for its end. `then` is called first, on the thread."""
        ended, found = threading.Event(), list[TransferResult]()

        def done(result: TransferResult) -> None:
            then()
            found.append(result)
            ended.set()

        ticket = TICKET.model_copy(update={"attempt": attempt})
        # Its own deadline is far away: nothing but an event may be what ends it.
        self.transfer.write(attempt, ticket, [piece], None, 600.0, done)

        def end() -> TransferResult:
            assert ended.wait(WAIT_S), "the transfer thread sleeps or has ended"
            return found[0]

        return end


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Run]:
    running = _Run(monkeypatch)
    yield running
    running.answers.set()
    running.transfer.close()


def test_an_answer_that_comes_while_the_thread_is_busy_is_not_lost(run: _Run) -> None:
    """It was told of by a notification that nobody waited for: the write then stood until its deadline."""
    busy, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        busy.set()
        assert go_on.wait(WAIT_S)

    end = run.write("late")
    assert run.asked.wait(WAIT_S)
    other = run.write("other", then=hold)
    # The thread has looked at the first one in this turn, and is not done with the second.
    assert busy.wait(WAIT_S)
    run.answers.set()
    parts: Any = run.transfer
    parts._peers.close()  # the answer has been told
    go_on.set()
    assert other().ok and end().ok


def test_an_address_that_is_none_ends_its_own_write_alone(run: _Run) -> None:
    run.answers.set()
    beyond = run.write("a", Piece(block_id=1, key="k", nbytes=64, remote_address=2**64))()
    assert not beyond.ok and "127.0.0.1:1 cannot be written to" in beyond.reason
    assert run.write("b")().ok


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pool_base", 2**64),
        ("pool_base", -1),
        ("block_stride", -1),
        ("record_address", 2**64),
        ("record_capacity", -1),
        ("skip_blocks", -1),
        ("session", "127.0.0.1:1\r\nDELETE"),
        ("session", "a" * 262),
        ("greeting", "127.0.0.1:1/x\r\nDELETE / HTTP/1.1\r\n"),
        ("greeting", "127.0.0.1:123456"),
        ("attempt", "a b"),
        ("blocks", [{"group": 0, "first": 0, "block_ids": [-1]}]),
        ("blocks", [{"group": -1, "first": 0, "block_ids": [1]}]),
    ],
)
def test_a_ticket_that_no_decode_makes_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as refused:
        Ticket.model_validate({**TICKET.model_dump(), field: value})
    assert all(error["loc"][0] == field for error in refused.value.errors())


def test_an_attempt_of_a_prefill_call_is_a_word() -> None:
    request = {"request_id": "r", "prompt_token_ids": [1], "sampling": {"max_tokens": 1}}
    call = {"request": request, "attempt": "a", "ticket": TICKET.model_dump()}
    assert PrefillCall.model_validate(call).attempt == "a"
    with pytest.raises(ValidationError, match="attempt"):
        PrefillCall.model_validate({**call, "attempt": "a\nb"})


def _drains(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[..., Answer], clock: Callable[[], float] = time.monotonic
) -> DirectTransfer:
    monkeypatch.setattr(peers, "ask_peer", ask)
    transfer = DirectTransfer(host="127.0.0.1", epoch="decode", clock=clock)
    transfer._writes.start(None)
    return transfer


def test_one_thousand_cancelled_attempts_are_asked_about_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kept a thread until its acknowledgement could be believed: 40 a second, while they held all blocks."""
    now = 100.0
    asked, all_asked, all_done = list[str](), threading.Event(), threading.Event()
    done: list[tuple[bool, int]] = []

    def ask(url: str, epoch: str, attempt: str, *_: object) -> Answer:
        asked.append(attempt)
        if len(asked) == 1000:
            all_asked.set()
        return Answer.DRAINED

    def told(drained: bool) -> None:
        done.append((drained, len(asked)))
        if len(done) == 1000:
            all_done.set()

    transfer = _drains(monkeypatch, ask, lambda: now)
    try:
        for number in range(1000):
            transfer.drained(f"a{number}", "http://127.0.0.1:1", "prefill", told)
        assert all_asked.wait(WAIT_S), f"threads waited for the first acknowledgements: {len(asked)} asked"
        assert not done, "none can be believed yet"
        ends = time.monotonic() + WAIT_S
        while not all_done.wait(0.01):  # the last acknowledgements may have come after the clock was moved
            assert time.monotonic() < ends, f"{len(done)} done"
            now += module.GRACE_S
            transfer._writes.call(lambda: None)
        assert all(drained for drained, _ in done)
    finally:
        transfer.close()


def test_an_attempt_is_asked_about_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its leg asks again when an answer is late; a queue of such asks only grew."""
    asked, answer, ended = list[str](), threading.Event(), threading.Event()

    def ask(url: str, epoch: str, attempt: str, *_: object) -> Answer:
        asked.append(attempt)
        assert answer.wait(WAIT_S)
        return Answer.UNKNOWN

    transfer = _drains(monkeypatch, ask)
    try:
        for _ in range(3):
            transfer.drained("a", "http://127.0.0.1:1", "prefill", lambda _: ended.set())
        seen = threading.Event()
        transfer._writes.call(seen.set)
        assert seen.wait(WAIT_S)
        answer.set()
        assert ended.wait(WAIT_S)
        ended.clear()
        transfer.drained("a", "http://127.0.0.1:1", "prefill", lambda _: ended.set())
        assert ended.wait(WAIT_S)
        assert asked == ["a", "a"]
    finally:
        transfer.close()
