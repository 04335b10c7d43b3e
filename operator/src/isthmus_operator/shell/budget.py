"""Work on what a user wrote, off the event loop and for a bounded time: one service never stops the others.

The sizes that `api.limits` allows keep such work to milliseconds. This holds where they should have a gap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from threading import Thread
from typing import TypeVar

from ..errors import OverBudget

T = TypeVar("T")
BUDGET_S = 3.0
"""Of one piece of work. Below the time that the API server gives the webhook."""


class Workbench:
    """Runs one piece of work at a time on a thread: more would only share the interpreter."""

    def __init__(self, budget_s: float = BUDGET_S) -> None:
        self._budget_s = budget_s
        self._turn = asyncio.Lock()
        self._overdue: set[Hashable] = set()

    async def run(self, key: Hashable, work: Callable[[], T]) -> T:
        """What `work` returns or raises. OverBudget where it takes longer, and at once while earlier work of `key`
        still runs: a thread cannot be ended, so that it goes on beside all others, but only one a key."""
        if key in self._overdue:
            raise OverBudget(f"takes longer than {self._budget_s:g} s to work out, and is still at it")
        async with self._turn:
            done = _begin(work)
            await asyncio.wait((done,), timeout=self._budget_s)
        if done.done():
            return done.result()
        self._overdue.add(key)
        done.add_done_callback(lambda _: self._overdue.discard(key))
        raise OverBudget(f"takes longer than {self._budget_s:g} s to work out")


def _begin(work: Callable[[], T]) -> asyncio.Future[T]:
    """`work` on a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    # Whoever waited may have gone.
    done.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    def report(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = work()
        except Exception as raised:
            error = raised
        # The loop may have ended meanwhile; then nobody waits.
        if not loop.is_closed():
            loop.call_soon_threadsafe(report, result, error)

    Thread(target=run, daemon=True, name="workbench").start()
    return done
