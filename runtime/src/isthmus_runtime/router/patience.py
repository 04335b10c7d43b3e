"""A deadline for what peers do, which the router's own pauses do not use up."""

from __future__ import annotations

import asyncio
from types import TracebackType

_TURNS = 4


class Patience:
    """`async with Patience(seconds)`: TimeoutError when the body takes longer.

    The time is counted in turns, each begun when the end of the last one was seen. A process that stood still (its node
    was out of CPU, or it was stopped) finds the deadline over and the peer's answer there at once; with
    `asyncio.timeout` the deadline would win, and every engine that was being called would count as lost.
    """

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._turn_s = seconds / _TURNS
        self._timer = asyncio.timeout(None)
        self._handle: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        await self._timer.__aenter__()
        self._count(_TURNS)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        await self._timer.__aexit__(kind, error, trace)

    def _count(self, left: int) -> None:
        if left:
            self._handle = self._loop.call_later(self._turn_s, self._count, left - 1)
        else:
            self._timer.reschedule(self._loop.time())
