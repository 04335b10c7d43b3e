"""A queue of object keys: each at most once, never two workers on one key, failures again after growing pauses.

Who may write a service's objects decides how often it is woken. A burst is handled as it comes; what goes on for longer
is handled once a second, so that it leaves time for the others. Keys that are heavy have a line and a worker of their
own: of them one is worked on at a time, and none of those that wait holds a worker.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

Key = tuple[str, str]
"""Namespace and name."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pauses:
    """Seconds. settle: from a change to its handling, so that a burst is handled once; first, most: after failures,
    doubling; resync: between two runs without any change. Failures and resyncs are spread by up to a quarter.
    burst: runs of one key that follow each other as they come; one more is granted after each `refill`."""

    settle: float = 0.05
    first: float = 1.0
    most: float = 60.0
    resync: float = 60.0
    burst: int = 40
    refill: float = 1.0


class _Ready:
    """Keys that wait for one of some workers: namespaces in a circle, those of each in the order of coming. Somebody's
    hundred services, edited without end, wait for each other and not everybody else for them. Of the workers that the
    others leave a namespace has half: whose runs take long, as the API server may over an object, keeps nobody out."""

    def __init__(self) -> None:
        self.workers = 1
        self._of: OrderedDict[str, deque[Key]] = OrderedDict()
        self._busy: Counter[str] = Counter()
        self._news = asyncio.Event()

    def put_nowait(self, key: Key) -> None:
        self._of.setdefault(key[0], deque()).append(key)
        self._news.set()

    async def get(self) -> Key:
        """Whoever gets a key is busy with it until `done`."""
        while (namespace := next(filter(self._may_have_one, self._of), None)) is None:
            self._news.clear()
            await self._news.wait()
        keys = self._of[namespace]
        key = keys.popleft()
        if keys:
            self._of.move_to_end(namespace)
        else:
            del self._of[namespace]
        self._busy[namespace] += 1
        return key

    def done(self, key: Key) -> None:
        self._busy[key[0]] -= 1
        if not self._busy[key[0]]:
            del self._busy[key[0]]
        self._news.set()

    def _may_have_one(self, namespace: str) -> bool:
        own = self._busy[namespace]
        left = self.workers - (self._busy.total() - own)
        return own < (left + 1) // 2


class WorkQueue:
    """Runs `work(key)` for every key that was added, on one event loop.

    `work` returns when to run again at the latest, in seconds, or None for the usual resync. An exception of it is
    handed to `failed`, and the key runs again after a pause. A key that is removed is forgotten when it is next idle.
    `heavy` is asked when it is a key's turn, and nothing happens on the loop until `work` begins.
    """

    def __init__(
        self,
        work: Callable[[Key], Awaitable[float | None]],
        *,
        failed: Callable[[Key, Exception], None],
        heavy: Callable[[Key], bool] = lambda key: False,
        pauses: Pauses | None = None,
        spread: Callable[[], float] = random.random,
    ) -> None:
        self._work = work
        self._is_heavy = heavy
        self._failed = failed
        self._pauses = pauses or Pauses()
        self._spread = spread
        self._due: dict[Key, tuple[float, asyncio.TimerHandle]] = {}
        self._ready = _Ready()
        self._heavy = _Ready()
        self._waiting: set[Key] = set()
        self._running: set[Key] = set()
        self._again: set[Key] = set()
        self._anew: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._removed: set[Key] = set()
        self._full: dict[Key, float] = {}
        """When the runs that a key has had will all have been granted again."""

    def __len__(self) -> int:
        """Keys that wait for a worker."""
        return len(self._waiting)

    def add(self, key: Key, *, anew: bool = False) -> None:
        """Something about `key` has changed. `anew`: what is asked for, so that earlier failures mean nothing."""
        self._removed.discard(key)
        if anew:
            self._failures.pop(key, None)
        if key in self._running:
            self._again.add(key)
            if anew:
                self._anew.add(key)
        else:
            # A failing key keeps its pause: its own failed attempts cause changes too.
            self._schedule(key, self._pause(key) if key in self._failures else self._settle(key))

    def remove(self, key: Key) -> None:
        """The object is gone: no resync, no repetition."""
        if key in self._running or key in self._waiting:
            self._removed.add(key)
        self._forget(key)
        if (timer := self._due.pop(key, None)) is not None:
            timer[1].cancel()

    def _forget(self, key: Key) -> None:
        self._failures.pop(key, None)
        self._full.pop(key, None)

    async def run(self, workers: int) -> None:
        """Work until cancelled, with so many workers beside the one for heavy keys. May be called again after that, and
        continues with what was left."""
        self._ready.workers = workers
        async with asyncio.TaskGroup() as group:
            group.create_task(self._worker(self._heavy))
            for _ in range(workers):
                group.create_task(self._worker(self._ready))

    async def _worker(self, ready: _Ready) -> None:
        while True:
            key = await ready.get()
            if ready is self._ready and self._is_heavy(key):
                ready.done(key)
                self._heavy.put_nowait(key)
                continue
            self._waiting.discard(key)
            self._running.add(key)
            self._count(key)
            try:
                after = await self._once(key)
            except asyncio.CancelledError:
                self._now(key)
                raise
            finally:
                self._running.discard(key)
                ready.done(key)
            again, anew = key in self._again, key in self._anew
            self._again.discard(key)
            self._anew.discard(key)
            if key in self._removed:
                self._removed.discard(key)
                self._forget(key)
            elif anew:
                self.add(key, anew=True)
            else:
                self._schedule(key, self._settle(key) if again and key not in self._failures else after)

    async def _once(self, key: Key) -> float:
        """Run the work; the pause until the next run."""
        try:
            after = await self._work(key)
        except Exception as error:
            self._failures[key] = self._failures.get(key, 0) + 1
            self._failed(key, error)
            return self._pause(key)
        self._failures.pop(key, None)
        resync = self._pauses.resync * (1 + self._spread() / 4)
        return resync if after is None else min(after, resync)

    def _pause(self, key: Key) -> float:
        doubled: float = self._pauses.first * 2.0 ** min(self._failures[key] - 1, 16)
        return min(doubled, self._pauses.most) * (1 - self._spread() / 4)

    def _count(self, key: Key) -> None:
        now = asyncio.get_running_loop().time()
        self._full[key] = max(self._full.get(key, now), now) + self._pauses.refill

    def _settle(self, key: Key) -> float:
        """The pause after a change: longer where the key has used up its burst."""
        owed = self._full.get(key, 0.0) - asyncio.get_running_loop().time()
        return max(self._pauses.settle, owed - (self._pauses.burst - 1) * self._pauses.refill)

    def _schedule(self, key: Key, delay: float) -> None:
        """Run after `delay`, or earlier if that was planned."""
        if key in self._waiting:
            return
        loop = asyncio.get_running_loop()
        at = loop.time() + max(0.0, delay)
        known = self._due.get(key)
        if known is not None:
            if known[0] <= at:
                return
            known[1].cancel()
        self._due[key] = (at, loop.call_at(at, self._now, key))

    def _now(self, key: Key) -> None:
        self._due.pop(key, None)
        if key not in self._waiting:
            self._waiting.add(key)
            self._ready.put_nowait(key)
