"""The requests a process works on, for a drain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ..errors import Overloaded, RequestError


def _open() -> None:
    """Everybody may come in."""


class InFlight:
    """Counts requests, refuses new ones, and ends the rest.

    Handlers wrap their work in `track()`. After `abort()` they get CancelledError, and `cancelled()` tells it from that
    of a client that has gone.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._ends: WeakKeyDictionary[asyncio.Task[object], RequestError] = WeakKeyDictionary()
        """Of tasks that were told to end. Whoever asks, by `cancelled`, does so after its block."""
        self.gate: Callable[[], None] = _open
        """Called for each new request; raises its refusal."""
        self.leaving = False
        self.draining = False
        self.aborting = False

    def __len__(self) -> int:
        return len(self._tasks)

    def track(self) -> _Tracked:
        """A block that counts as a request of the current task; raises the refusal when draining."""
        if self.draining:
            raise self.refusal()
        self.gate()
        task = asyncio.current_task()
        assert task is not None
        return _Tracked(self, task)

    def add(self, task: asyncio.Task[object]) -> None:
        """The task works on a request."""
        self._tasks.add(task)
        self._idle.clear()

    def remove(self, task: asyncio.Task[object]) -> None:
        """Note that the request has ended."""
        self._tasks.discard(task)
        if not self._tasks:
            self._idle.set()

    def refusal(self) -> Overloaded:
        """The error of a request that this process will not take or finish."""
        return Overloaded("this process is shutting down; try again", retry_after_s=1.0)

    def cancelled(self) -> RequestError | None:
        """For a handler that was cancelled: what to answer with, when it was by `abort` or `end`; None when its client
        left."""
        task = asyncio.current_task()
        assert task is not None
        error = self._ends.pop(task, None)
        if error is None and self.aborting:
            error = self.refusal()
        if error is not None:
            task.uncancel()  # the client is still there and gets an answer
        return error

    def works_on(self, task: asyncio.Task[object] | None) -> bool:
        """Whether the task works on a request that was not told to end."""
        return task in self._tasks and task not in self._ends

    def end(self, task: asyncio.Task[object], error: RequestError) -> None:
        """The request that the task works on ends with `error`."""
        assert self.works_on(task), "of no request"
        self._ends[task] = error
        task.cancel()

    def start_leaving(self) -> None:
        """Say so (readiness, `Connection: close`), and still take what comes."""
        self.leaving = True

    def start_drain(self) -> None:
        """Take no new request from now on."""
        self.leaving = self.draining = True

    async def wait_idle(self) -> None:
        """Returns when no request is left."""
        await self._idle.wait()

    def abort(self) -> None:
        """Cancel every tracked task."""
        self.aborting = True
        for task in self._tasks:
            task.cancel()


class _Tracked(NamedTuple):
    """The block of `InFlight.track`. One a request: as a generator it costs three times as much."""

    requests: InFlight
    task: asyncio.Task[object]

    def __enter__(self) -> None:
        self.requests.add(self.task)

    def __exit__(self, *_: object) -> None:
        self.requests.remove(self.task)
