"""When the TransferEngine that peers write through is replaced, and when the one before it may be closed."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from isthmus_runtime.errors import ConfigError
from isthmus_runtime.transfer.backend import Effective
from isthmus_runtime.transfer.native_engine import NativeEngine
from isthmus_runtime.transfer.sessions import AGAIN_S, SILENT_S, TRIES, Sessions


class Listening:
    """Stands for a TransferEngine: it listens for as long as somebody holds it."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        sockets.append(self.socket)
        self.port = self.socket.getsockname()[1]

    def __del__(self) -> None:
        self.socket.close()


@dataclass
class Made:
    """Sessions over such engines, and their clock."""

    renewable: bool = True
    now: float = 0.0
    problem: str = ""
    ports: list[int] = field(default_factory=list)
    """Instead of those of the next engines."""
    changes: list[str] = field(default_factory=list)
    kept: list[object] = field(default_factory=list)
    sockets: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        start = self.start if self.renewable else None
        self.sessions = Sessions(self.start(), start, lambda native: self.changes.append(native.session), self.clock)

    def clock(self) -> float:
        return self.now

    def start(self) -> NativeEngine:
        if self.problem:
            raise ConfigError(self.problem)
        engine = Listening(self.sockets)
        port = self.ports.pop() if self.ports else engine.port
        return NativeEngine(engine, f"127.0.0.1:{engine.port}", frozenset({port}), Effective("tcp", 1.0))

    def shut(self, attempt: str) -> bool:
        """Asks, and waits for what that has begun."""
        found = self.sessions.shut(attempt)
        self.sessions._threads.submit(lambda: None).result(20)
        return found

    def session(self, attempt: str) -> str:
        return self.sessions.reserve(attempt).session


Make = Callable[..., Made]


@pytest.fixture
def make() -> Iterator[Make]:
    worlds: list[Made] = []

    def one(**settings: bool) -> Made:
        worlds.append(Made(**settings))
        return worlds[-1]

    yield one
    for world in worlds:
        world.sessions.close()
        for listening in world.sockets:
            listening.close()


def test_a_peer_that_is_silent_for_long_is_shut_out(make: Make) -> None:
    made = make()
    first = made.session("lost")
    assert not made.shut("lost")
    made.now = SILENT_S - 0.1
    assert not made.shut("lost") and not made.changes
    made.now = SILENT_S
    assert not made.shut("lost")
    assert made.changes == [made.session("next")] and made.changes[0] != first
    assert not made.shut("lost"), "it is being closed"
    assert made.shut("lost")
    host, port = first.split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), 5)
    made.sessions.forget("lost")
    assert not made.shut("lost")


def test_it_is_closed_when_all_other_tickets_are_over_or_given_up(make: Make) -> None:
    made = make()
    for attempt in ("lost", "live", "also lost"):
        made.sessions.reserve(attempt)
    made.shut("lost")
    made.now = SILENT_S
    made.shut("lost")
    assert made.changes
    made.now = 2 * SILENT_S
    assert not made.shut("also lost") and not made.shut("lost"), "one is live"
    made.sessions.forget("live")
    assert not made.shut("lost")
    assert made.shut("lost") and made.shut("also lost")


def test_what_begins_later_is_not_concerned(make: Make) -> None:
    made = make()
    made.sessions.reserve("lost")
    made.shut("lost")
    made.now = SILENT_S
    made.shut("lost")
    name = made.session("new")
    for _ in range(3):
        made.shut("lost")
    assert made.sessions.native.session == name and made.sessions.ports_of("new")
    assert not made.shut("new"), "asked for the first time"
    made.now += SILENT_S / 2
    assert not made.shut("new") and made.sessions.native.session == name


def test_an_engine_that_somebody_holds_is_not_taken_for_closed(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    made = make()
    made.kept.append(made.sessions.reserve("lost").engine)
    made.shut("lost")
    made.now = SILENT_S
    for _ in range(3):
        assert not made.shut("lost")
    assert [r.levelno for r in caplog.records].count(logging.ERROR) == 1
    made.now += AGAIN_S
    for _ in range(3):
        assert not made.shut("lost"), "nor when it is tried again"
    made.kept.clear()
    made.now += AGAIN_S
    made.shut("lost")
    assert made.shut("lost")


def test_no_engine_gets_a_port_that_an_earlier_one_had(make: Make) -> None:
    made = make()
    (used,) = made.sessions.native.ports
    made.sessions.reserve("lost")
    made.shut("lost")
    made.now, made.ports = SILENT_S, [used] * 3
    made.shut("lost")
    assert made.changes and used not in made.sessions.native.ports


@pytest.mark.parametrize("why", ["ports", "start"])
def test_where_no_other_engine_starts_it_is_tried_again_later(
    make: Make, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = make()
    (used,) = made.sessions.native.ports
    made.sessions.reserve("lost")
    made.shut("lost")
    made.now = SILENT_S
    made.ports, made.problem = ([used] * TRIES, "") if why == "ports" else ([], "no descriptors")
    for _ in range(3):
        assert not made.shut("lost")
    assert not made.changes and len(caplog.records) == 1
    made.now, made.ports, made.problem = SILENT_S + AGAIN_S, [], ""
    made.shut("lost")
    assert made.changes


def test_where_a_peer_writes_by_itself_blocks_stay_set_aside(make: Make) -> None:
    made = make(renewable=False)
    made.sessions.reserve("lost")
    for made.now in (0.0, SILENT_S, 1e6):
        assert not made.shut("lost")
    assert not made.changes
