"""Work of some milliseconds on an event loop, of which many pieces may be due in one turn of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MOST_S = 0.02
"""Of a turn. A thousand requests that arrive together would else be planned in one, and all wait for the last."""


class LoopShare:
    """How much of a turn of the event loop one kind of work may have. Of one loop."""

    def __init__(self, most_s: float = MOST_S, clock: Callable[[], float] = time.perf_counter) -> None:
        self._most_s = most_s
        self._clock = clock
        self._spent_s = 0.0

    async def room(self) -> None:
        """Return in a turn that has room for more, in the order of asking. Usually that is this one."""
        while self._spent_s >= self._most_s:  # noqa: ASYNC110  (the next turn is what is waited for)
            await asyncio.sleep(0)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """The work itself, after `room`."""
        began = self._clock()
        try:
            yield
        finally:
            if not self._spent_s:
                asyncio.get_running_loop().call_soon(self._next_turn)
            self._spent_s += self._clock() - began

    def _next_turn(self) -> None:
        self._spent_s = 0.0
