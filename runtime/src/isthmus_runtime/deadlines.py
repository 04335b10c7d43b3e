"""Deadlines of many requests on one timer: setting and dropping one must cost little.

A deadline fires up to `TICK_S` late. Exact timers are the event loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from types import TracebackType

TICK_S = 0.05


class Deadline:
    """One callback that is due. Made by `Deadlines.at`."""

    __slots__ = ("_callback", "_slot")

    def __init__(self, callback: Callable[[], None], slot: set[Deadline]) -> None:
        self._callback: Callable[[], None] | None = callback
        self._slot = slot
        slot.add(self)

    def cancel(self) -> None:
        """It will not fire. Idempotent, also after it has fired."""
        self._slot.discard(self)
        self._callback = None  # mostly a method of whoever holds this: no cycle is left behind

    def fire(self) -> None:
        """Call back. For `Deadlines`."""
        if self._callback is not None:
            self._callback()


class Deadlines:
    """Calls back at given times of one event loop's clock."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._slots: dict[int, set[Deadline]] = {}
        """Tick -> what is due at its end."""
        self._order: list[int] = []
        """A heap of the ticks in `_slots`."""
        self._timer: asyncio.TimerHandle | None = None

    def at(self, when: float, callback: Callable[[], None]) -> Deadline:
        """Call `callback` at `when`, or up to TICK_S later."""
        tick = int(when / TICK_S) + 1
        slot = self._slots.get(tick)
        if slot is None:
            slot = self._slots[tick] = set()
            heappush(self._order, tick)
            if self._order[0] == tick:
                self._arm()
        return Deadline(callback, slot)

    def limit(self, seconds: float) -> Limit:
        """A `with` block that takes no longer; raises TimeoutError as asyncio.timeout does."""
        return Limit(self, self._loop.time() + seconds)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._order[0] * TICK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self._loop.time()
        try:
            while self._order and self._order[0] * TICK_S <= now:
                slot = self._slots.pop(heappop(self._order))
                while slot:
                    slot.pop().fire()
        finally:
            if self._order:
                self._arm()


class Limit:
    """Cancels the task in its block when the time is up, and raises TimeoutError then. Made by `Deadlines.limit`."""

    __slots__ = ("_cancelling", "_deadline", "_deadlines", "_expired", "_task", "_when")

    def __init__(self, deadlines: Deadlines, when: float) -> None:
        self._deadlines = deadlines
        self._when = when
        self._expired = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._deadline = self._deadlines.at(self._when, self._expire)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deadline.cancel()
        # A cancellation from elsewhere, before or with ours, goes on as such.
        if self._expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _expire(self) -> None:
        self._expired = True
        self._task.cancel()
