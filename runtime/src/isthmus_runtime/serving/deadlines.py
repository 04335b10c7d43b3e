"""Deadlines of many requests behind one timer.

Hardly a deadline ever passes, and a timer of uvloop's is made and closed for each; one timer, of the earliest, does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import inf
from types import TracebackType

_FEW = 64
"""Dropped deadlines that may stay in line; beyond that, as many as there are others."""
_EARLY_S = 0.001
"""uvloop counts milliseconds."""


class Deadline:
    """One of them. Made by `Deadlines.at`."""

    __slots__ = ("_queue", "expire")

    def __init__(self, queue: Deadlines, expire: Callable[[], None]) -> None:
        self._queue = queue
        self.expire: Callable[[], None] | None = expire
        """Called once it has passed; None: it has, or was dropped."""

    def drop(self) -> None:
        """It does not matter any more. Idempotent."""
        if self.expire is not None:
            self.expire = None
            self._queue.note_dropped()


class Deadlines:
    """Those of one event loop, by the loop's clock. The length counts some that were dropped."""

    def __init__(self, running_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.get_running_loop) -> None:
        self._loop = running_loop
        self._line: list[tuple[float, int, Deadline]] = []
        """A heap; the number keeps equal ones apart."""
        self._made = 0
        self._dropped = 0
        """Of those in line."""
        self._armed = inf
        """When the timer fires that is the earliest."""

    def __len__(self) -> int:
        return len(self._line)

    def at(self, due: float, expire: Callable[[], None]) -> Deadline:
        """Call `expire` at `due`, seconds of the loop's clock, unless the deadline is dropped before that."""
        deadline = Deadline(self, expire)
        self._made += 1
        heappush(self._line, (due, self._made, deadline))
        if due < self._armed:
            self._arm(due)
        return deadline

    def within(self, seconds: float) -> Within:
        """As `asyncio.timeout`, in a plain `with`: TimeoutError where the block takes longer."""
        return Within(self, self._loop().time() + seconds)

    def note_dropped(self) -> None:
        """One of those in line was dropped."""
        self._dropped += 1
        if self._dropped > _FEW and 2 * self._dropped > len(self._line):
            self._line = [entry for entry in self._line if entry[2].expire is not None]
            heapify(self._line)
            self._dropped = 0

    def _arm(self, due: float) -> None:
        self._armed = due
        self._loop().call_at(due, self._fire, due)

    def _fire(self, due: float) -> None:
        if due != self._armed:
            return  # an earlier one was armed after this, and arms what follows
        self._armed = inf
        now = self._loop().time() + _EARLY_S
        while self._line and (self._line[0][0] <= now or self._line[0][2].expire is None):
            deadline = heappop(self._line)[2]
            expire, deadline.expire = deadline.expire, None
            if expire is None:
                self._dropped -= 1
            else:
                expire()
        if self._line and self._line[0][0] < self._armed:
            self._arm(self._line[0][0])


class Within:
    """The block of `Deadlines.within`."""

    __slots__ = ("_cancelling", "_deadline", "_deadlines", "_due", "_expired", "_task")

    def __init__(self, deadlines: Deadlines, due: float) -> None:
        self._deadlines = deadlines
        self._due = due

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._expired = False
        self._deadline = self._deadlines.at(self._due, self._expire)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deadline.drop()
        # A cancellation by somebody else at the same time is theirs.
        if self._expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _expire(self) -> None:
        self._expired = True
        self._task.cancel()
