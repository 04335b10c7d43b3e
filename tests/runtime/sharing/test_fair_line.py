"""Threads that wait for one place: fair by time, without credit."""

from __future__ import annotations

import threading

import pytest

from isthmus_runtime.errors import Cancelled
from isthmus_runtime.sharing.fair_line import FairLine

DEADLINE_S = 60.0


def test_the_line_is_fair_by_time_and_gives_nobody_credit() -> None:
    now = [0.0]
    line, order, pause = FairLine(lambda: now[0]), [], threading.Event()
    threads: list[threading.Thread] = []

    def wait(who: str, number: int, seconds: float) -> None:
        with line.turn(who, lambda: None):
            order.append((who, number))
            now[0] += seconds

    def come(*clients: tuple[str, int, float]) -> None:
        for client in clients:
            waiting = sum(map(len, line._waiting.values()))
            threads.append(threading.Thread(target=wait, args=client))
            threads[-1].start()
            while sum(map(len, line._waiting.values())) == waiting:
                pause.wait(0.001)

    def go() -> list[tuple[str, int]]:
        for thread in threads:
            thread.join(DEADLINE_S)
        found, order[:] = list(order), []
        return found

    with line.turn("long", lambda: None):
        now[0] += 9.0
        come(
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

        with pytest.raises(Cancelled), line.turn("d", leave):
            pass
    assert go() == [("a", 1), ("b", 1), ("c", 1), ("a", 2), ("b", 2), ("long", 1), ("long", 2)]
    assert not line._waiting and line._has is None and "d" not in line._ended
    # Who has sent texts all the time waits for one of a new client, not for as many as it has had.
    for number in range(20):
        wait("steady", number, 1.0)
    go()
    with line.turn("new", lambda: None):
        now[0] += 1.0
        come(("new", 1, 1.0), ("new", 2, 1.0), ("new", 3, 1.0), ("steady", 1, 1.0), ("steady", 2, 1.0))
    assert go().index(("steady", 1)) <= 1
    assert len(line._ended) <= 2, "nobody is remembered for ever"
