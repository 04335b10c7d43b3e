"""What a process knows of its peers: who may be written to, and who is not asked again just now."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest

from isthmus_runtime.transfer import peers as module
from isthmus_runtime.transfer.drain import ASK_TIMEOUT_S, Answer
from isthmus_runtime.transfer.greeting import Greeter
from isthmus_runtime.transfer.peers import GREETING_S, SILENT_S, Peer, Peers

WAIT_S = 20.0


def test_a_greeting_that_ends_after_its_attempt_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GREETING_S", WAIT_S)
    heard, go = threading.Event(), threading.Event()

    def problem(claim: bytes) -> str:
        heard.set()
        return "" if go.wait(WAIT_S) else "the test has left"

    greeter = Greeter("127.0.0.1", "decode", problem)
    peers = Peers(lambda: 100.0)
    told = SimpleQueue[str]()
    try:
        peers.expect("a")
        peers.greet(Peer("127.0.0.1:1", greeter.address, "decode"), b"claim", "a", told.put)
        assert heard.wait(WAIT_S)
        peers.forget("a")
        go.set()
        assert told.get(timeout=WAIT_S) == ""
    finally:
        go.set()
        peers.close()
        greeter.close()
    assert peers._greeted and not peers._shown


def test_a_peer_that_has_just_kept_silent_keeps_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode that is stopped accepts connections: sixty attempts for it held up those for others past their
    deadlines."""
    now, greeted, asked = [100.0], list[str](), list[str]()

    def greet(address: str, *_: object) -> str:
        greeted.append(address)
        now[0] += GREETING_S + 0.01
        return "does not answer: timed out"

    def ask(url: str, *_: object) -> Answer:
        asked.append(url)
        now[0] += ASK_TIMEOUT_S + 0.01
        return Answer.UNKNOWN

    monkeypatch.setattr(module, "greeting_problem", greet)
    monkeypatch.setattr(module, "ask_peer", ask)
    peers = Peers(lambda: now[0])
    peer = Peer("127.0.0.1:1", "127.0.0.1:2", "decode")

    def greeting() -> str:
        told = SimpleQueue[str]()
        peers.greet(peer, b"", "a", told.put)
        return told.get(timeout=WAIT_S)

    def drain(attempt: str) -> Answer:
        told = SimpleQueue[Answer]()
        peers.ask_drain("http://127.0.0.1:1", "e", attempt, told.put)
        return told.get(timeout=WAIT_S)

    try:
        assert "timed out" in greeting()
        assert "it did not a moment ago" in greeting()
        now[0] += SILENT_S
        assert "timed out" in greeting()
        assert len(greeted) == 2
        for number, times in ((0, 1), (1, 1), (2, 2)):
            now[0] += SILENT_S if number == 2 else 0.0
            assert drain(f"a{number}") is Answer.UNKNOWN and len(asked) == times
    finally:
        peers.close()


def test_only_who_said_so_a_moment_ago_and_knew_the_ticket_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module, "greeting_problem", lambda *_: "")
    peers = Peers(lambda: now[0])
    peer = Peer("127.0.0.1:1", "127.0.0.1:2", "decode")

    def greet(attempt: str) -> None:
        told = SimpleQueue[str]()
        peers.greet(peer, b"", attempt, told.put)
        assert told.get(timeout=WAIT_S) == ""

    try:
        peers.expect("a")
        peers.expect("b")
        assert not peers.may_write(peer, "a"), "nobody was asked"
        greet("a")
        assert peers.may_write(peer, "a")
        assert not peers.may_write(peer, "b"), "its ticket was not shown"
        assert not peers.may_write(peer._replace(epoch="later"), "a"), "another process"
        peers.doubt(peer)
        assert not peers.may_write(peer, "a"), "a write to it failed"
        greet("b")
        assert peers.may_write(peer, "a") and peers.may_write(peer, "b")
        now[0] += module.FRESH_S
        assert not peers.may_write(peer, "a"), "it may be another process by now"
    finally:
        peers.close()


def test_what_cannot_be_asked_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for the answer gets one, and the thread goes on."""

    def fails(*_: object) -> str:
        raise RuntimeError("of the library")

    monkeypatch.setattr(module, "greeting_problem", fails)
    peers = Peers(lambda: 100.0)
    told, answers = SimpleQueue[str](), SimpleQueue[Answer]()
    try:
        for _ in range(9):  # more than there are threads
            peers.greet(Peer("127.0.0.1:1", "127.0.0.1:2", "decode"), b"claim", "a", told.put)
            assert "cannot be asked: RuntimeError('of the library')" in told.get(timeout=WAIT_S)
        peers.ask_drain("http://127.0.0.1:99999", "decode", "a", answers.put)  # no port
        assert answers.get(timeout=WAIT_S) is Answer.UNKNOWN
    finally:
        peers.close()
