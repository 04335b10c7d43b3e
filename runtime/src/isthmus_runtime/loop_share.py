"""Work of some milliseconds on an event loop, of which many pieces may be due in one turn of it."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By client, the next one first."""
        self._called: deque[asyncio.Future[None]] = deque()
        """Before them: those whose turn it was, and for whom others before them in it left no room."""

    async def room(self, who: str = "") -> None:
        """Return in a turn that has room for a piece of client `who`. Usually that is this one."""
        loop = asyncio.get_running_loop()
        if self._waiting or self._called or self._spent_s >= self._most_s:
            future = loop.create_future()
            self._waiting.setdefault(who, deque()).append(future)
            await future
            while self._spent_s >= self._most_s:  # they took longer than such pieces did until now
                self._called.append(future := loop.create_future())
                await future

    @contextmanager
    def spending(self) -> Iterator[None]:
        """The work itself, after `room`."""
        began = self._clock()
        try:
            yield
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
        while left > 0 and (future := self._next()) is not None:
            if not future.done():  # it has not left
                future.set_result(None)
                left -= max(self._usual_s, self._most_s / 100)
        if self._waiting or self._called:
            self._end_turn()

    def _next(self) -> asyncio.Future[None] | None:
        if self._called:
            return self._called.popleft()
        if not self._waiting:
            return None
        who, queue = self._waiting.popitem(last=False)
        future = queue.popleft()
        if queue:
            self._waiting[who] = queue
        return future
