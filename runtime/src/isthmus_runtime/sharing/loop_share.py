"""Work of some milliseconds on an event loop, of which many pieces may be due in one turn of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from .circle import Circle

_M = TypeVar("_M")
MOST_S = 0.02
"""Of a turn. A thousand requests that arrive together would else be planned in one, and all wait for the last."""


class LoopShare:
    """How much of a turn of the event loop one kind of work may have: of those that wait for it clients are served in a
    circle, so that nobody gets more by asking more often. Of one loop."""

    def __init__(self, most_s: float = MOST_S, clock: Callable[[], float] = time.perf_counter) -> None:
        self._most_s = most_s
        self._clock = clock
        self._spent_s = 0.0
        self._usual_s = 0.0
        """What a piece takes, of late."""
        self._ends = False
        """The present turn is known to end."""
        self._waiting = Circle()
        self._called = Circle()
        """Before them: those whose turn it was, and for whom others before them in it left no room."""

    async def room(self, who: str = "") -> None:
        """Return in a turn that has room for a piece of client `who`. Usually that is this one."""
        if self._waiting or self._called or self._spent_s >= self._most_s:
            await self._waiting.add(who)
            while self._spent_s >= self._most_s:  # they took longer than such pieces did until now
                await self._called.add(who)

    def spend(self, make: Callable[[], _M]) -> _M:
        """The work itself, after `room`."""
        began = self._clock()
        try:
            return make()
        finally:
            self._end_turn()
            took = self._clock() - began
            self._spent_s += took
            self._usual_s = (self._usual_s + took) / 2

    def _end_turn(self) -> None:
        if not self._ends:
            self._ends = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._spent_s, self._ends = 0.0, False
        left = self._most_s
        for circle in (self._called, self._waiting):
            while left > 0 and circle and circle.give() is not None:
                left -= max(self._usual_s, self._most_s / 100)
        if self._waiting or self._called:
            self._end_turn()
