"""Threads that wait for one place: fair by time, without credit."""

from __future__ import annotations

import threading

import pytest

from isthmus_runtime.errors import Cancelled
from isthmus_runtime.sharing import fair_line
from isthmus_runtime.sharing.fair_line import FairLine

DEADLINE_S = 60.0


class Line:
    """One on a clock that only its works move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.line = FairLine(lambda: self.now)
        self.remembered = 0
        """The most clients of whom it ever was."""
        self._order: list[tuple[str, int]] = []
        self._threads: list[threading.Thread] = []
        self._pause = threading.Event()

    def wait(self, who: str, number: int, seconds: float) -> None:
        with self.line.turn(who, lambda: None):
            self._order.append((who, number))
            self.now += seconds
            self.remembered = max(self.remembered, len(self.line._ended))

    def come(self, *clients: tuple[str, int, float]) -> None:
        for client in clients:
            waiting = sum(map(len, self.line._waiting.values()))
            self._threads.append(threading.Thread(target=self.wait, args=client))
            self._threads[-1].start()
            while sum(map(len, self.line._waiting.values())) == waiting:
                self._pause.wait(0.001)

    def go(self) -> list[tuple[str, int]]:
        for thread in self._threads:
            thread.join(DEADLINE_S)
        found, self._order = self._order, []
        return found


def test_the_line_is_fair_by_time_and_gives_nobody_credit() -> None:
    one = Line()
    with one.line.turn("long", lambda: None):
        one.now += 9.0
        one.come(
            ("long", 1, 9.0),
            ("long", 2, 9.0),
            ("a", 1, 0.1),
            ("a", 2, 0.1),
            ("b", 1, 0.1),
            ("c", 1, 0.1),
            ("b", 2, 0.1),
        )

        def leave() -> None:
            raise Cancelled("gone")

        with pytest.raises(Cancelled), one.line.turn("d", leave):
            pass
    assert one.go() == [("a", 1), ("b", 1), ("c", 1), ("a", 2), ("b", 2), ("long", 1), ("long", 2)]
    assert not one.line._waiting and one.line._has is None
    # Who has sent texts all the time waits for one of a new client, not for as many as it has had.
    with one.line.turn("a", lambda: None):
        one.come(*(("steady", number, 1.0) for number in range(20)), ("b", 0, 30.0))
    one.go()
    with one.line.turn("new", lambda: None):
        one.now += 1.0
        one.come(("new", 1, 1.0), ("new", 2, 1.0), ("new", 3, 1.0), ("steady", 1, 1.0), ("steady", 2, 1.0))
    assert one.go().index(("steady", 1)) <= 1


def test_what_was_taken_while_nobody_else_came_is_forgotten() -> None:
    one = Line()
    one.wait("long", 0, 9.0)
    one.go()
    with one.line.turn("first", lambda: None):
        one.come(("a", 1, 0.1), ("long", 1, 0.1), ("b", 1, 0.1))
    assert one.go() == [("a", 1), ("long", 1), ("b", 1)]
    assert not one.line._ended


def test_of_many_clients_those_are_remembered_that_have_taken_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_line, "MOST_REMEMBERED", 8)
    one = Line()
    with one.line.turn("long", lambda: None):
        one.now += 9.0
        one.come(("long", 1, 0.1), *((str(number), 0, 0.1) for number in range(30)))
    assert one.go()[-1] == ("long", 1)
    assert one.remembered == 8
