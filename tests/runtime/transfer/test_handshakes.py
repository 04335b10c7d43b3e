"""A peer whose TransferEngine accepts a connection and says nothing: it costs its own transfer, and no other."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from isthmus_runtime.transfer import handshakes as module
from isthmus_runtime.transfer.greeting import Greeter
from isthmus_runtime.transfer.handshakes import Handshakes


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that the kernel accepts connections for."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def asks(address: str, asked: list[str]) -> Callable[[], int]:
    """As Mooncake at a first write: connects, and waits for an answer."""

    def write() -> int:
        asked.append(address)
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), 20) as peer:
            return len(peer.recv(1))

    return write


def test_a_silent_peer_is_left_and_not_tried_for_a_while(monkeypatch: pytest.MonkeyPatch, silent: str) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.05)
    now, asked = [100.0], list[str]()
    handshakes = Handshakes(lambda: now[0])
    try:
        # An error would be socket.create_connection's own timeout.
        assert handshakes.submit(silent, asks(silent, asked)) == 0
        assert handshakes.silent(silent)
        assert handshakes.submit(silent, asks(silent, asked)) == 0
        assert len(asked) == 1, "it was tried again at once"
        now[0] += module.SILENT_S
        assert not handshakes.silent(silent)
        assert handshakes.submit(silent, asks(silent, asked)) == 0
        assert len(asked) == 2
    finally:
        handshakes.close()


def test_who_has_answered_may_take_its_time(monkeypatch: pytest.MonkeyPatch, silent: str) -> None:
    """Later writes do not wait for it, and connections to it are those of transfers."""
    monkeypatch.setattr(module, "ANSWER_S", 0.05)
    handshakes = Handshakes(lambda: 0.0)
    try:
        assert handshakes.submit(silent, lambda: 7) == 7
        host, _, port = silent.rpartition(":")
        with socket.create_connection((host, int(port)), 0.3) as peer:

            def slow() -> int:
                with pytest.raises(TimeoutError):
                    peer.recv(1)
                return 8

            assert handshakes.submit(silent, slow) == 8
        assert handshakes.submit("127.0.0.1:1", lambda: 0) == 0
        assert not handshakes.silent("127.0.0.1:1"), "a peer that refuses is not silent"
        with pytest.raises(ValueError, match="is not host:port"):
            handshakes.submit("nowhere", lambda: 1)
    finally:
        handshakes.close()


def test_who_has_answered_is_forgotten_when_many_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine that comes has a port of its own."""
    monkeypatch.setattr(module, "MOST_MET", 2)
    handshakes = Handshakes(lambda: 0.0)
    try:
        for number in (1, 2, 1, 3):
            assert handshakes.submit(f"127.0.0.1:{number}", lambda: 7) == 7
        assert list(handshakes._met) == ["127.0.0.1:1", "127.0.0.1:3"]
    finally:
        handshakes.close()


@pytest.mark.slow  # starts processes
def test_a_silent_peer_holds_up_no_other_transfer(start_engine: Callable[..., Any], silent: str) -> None:
    """Mooncake waited a minute for it, and every other transfer with it."""
    prefill, decode = start_engine("direct", timeout=15.0), start_engine("direct")
    hello = prefill.hello
    blocks = [[0, 5, "k"]]

    def reserve(attempt: str) -> Any:
        return decode.call(
            "open_receive", attempt=attempt, blocks=blocks, tokens=40, url=hello["url"], epoch=hello["epoch"]
        )

    prefill.call("fill", blocks=[1], seed=3)
    stage = Greeter("127.0.0.1", "mute", lambda said: "")
    changed = {"session": silent, "greeting": stage.address, "epoch": "mute"}
    for attempt, ticket in (("mute", {**reserve("mute"), **changed}), ("well", reserve("well"))):
        prefill.call("open_send", attempt=attempt, ticket=ticket)
        prefill.call("send_blocks", attempt=attempt, blocks=[[0, 1, "k"]])
        prefill.call("finish_send", attempt=attempt, tokens=40)
    assert prefill.event("mute", "failed")["reason"] == f"{silent} does not answer a handshake"
    ended = prefill.event("well", "sent", "failed")
    assert ended["event"] == "sent", ended
    stage.close()
