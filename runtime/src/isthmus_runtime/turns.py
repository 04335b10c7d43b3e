"""Whose turn it is at something that serves few at a time: clients in a circle, and each client's own in order."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from .errors import Cancelled, InvalidRequest, Overloaded, RequestError
from .threads import running_pool

_log = logging.getLogger(__name__)
MOST_WORK_S = 60.0
"""Of a processor, that a thread works for one request. The longest texts that are taken need a sixth of it, and more
where processors are slow."""
TURN_S = 1.0
"""Of a processor, after which others who wait have the place, and the rest of the work another turn."""
_PAUSED = 3
"""Works that may be paused, for each place: threads that wait."""
_LOOK_S = 1.0
_A = TypeVar("_A")
_M = TypeVar("_M")


class Turns:
    """A lock, or a few of them, that nobody gets more of by asking more often. Belongs to one event loop."""

    def __init__(
        self,
        most: int,
        what: str,
        places: int = 1,
        *,
        each: int = 0,
        one_by_one: Callable[[], bool] = lambda: False,
    ) -> None:
        """`most`: how many may wait. `what` they wait for, in the refusal of others. `places`: how many have a turn at
        a time; of several, one client never has all, or only `each`. `one_by_one`: whether there is one place now,
        whatever `places` says."""
        self._each = each
        self._one_by_one = one_by_one
        self._most = most
        self._what = what
        self._places = places
        self._having: Counter[str] = Counter()
        """Turns that clients have now."""
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By client, the next one first."""

    @asynccontextmanager
    async def turn(self, who: str) -> AsyncIterator[None]:
        """Wait for a turn of client `who`, and have it for the block. Overloaded as of `take`."""
        await self.take(who)
        try:
            yield
        finally:
            self.give_back(who)

    async def take(self, who: str) -> None:
        """Wait for a turn of client `who`, and have it until `give_back`.

        Overloaded (429) when too many wait; also later, for the last of the client that has most of them waiting, to
        make room for another client.
        """
        if self._may(who):
            self._having[who] += 1
        else:
            await self._wait(who)

    def give_back(self, who: str) -> None:
        """A turn of client `who` is over: the next one begins."""
        self._having[who] -= 1
        if not self._having[who]:
            del self._having[who]
        self._give_on()

    def _may(self, who: str) -> bool:
        places = 1 if self._one_by_one() else self._places
        each = min(self._each or places, max(1, places - 1))
        return self._having.total() < places and self._having[who] < each

    def others_wait(self, who: str) -> bool:
        """Whether somebody but client `who` does. From any thread."""
        return len(self._waiting) > (who in self._waiting)

    async def _wait(self, who: str) -> None:
        self._make_room(who)
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(who, deque()).append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.cancelled() or future.exception():
                self._forget(who, future)
            else:
                self.give_back(who)  # it was given the turn, and has left
            raise

    def _make_room(self, who: str) -> None:
        count = sum(map(len, self._waiting.values()))
        if count < self._most:
            return
        error = Overloaded(f"{count} {self._what}; retry later", status=429)
        longest = max(self._waiting, key=lambda name: len(self._waiting[name]))
        if len(self._waiting[longest]) < len(self._waiting.get(who, ())) + 2:
            raise error
        leaver = self._waiting[longest].pop()
        if not leaver.done():  # it may have left by itself a moment ago
            leaver.set_exception(error)

    def _give_on(self) -> None:
        while self._give_one():  # several where there was one place for a while
            pass

    def _give_one(self) -> bool:
        for who in [name for name in self._waiting if self._may(name)]:
            queue = self._waiting[who]
            while queue:
                future = queue.popleft()
                if future.done():
                    continue
                if queue:
                    self._waiting.move_to_end(who)
                else:
                    del self._waiting[who]
                self._having[who] += 1
                future.set_result(None)
                return True
            del self._waiting[who]
        return False

    def _forget(self, who: str, future: asyncio.Future[None]) -> None:
        queue = self._waiting.get(who, deque())
        if future in queue:
            queue.remove(future)
        if not queue:
            self._waiting.pop(who, None)


class _Task:
    """What a thread does for somebody, in one turn or several."""

    def __init__(self, who: str, pause: Callable[[_Task], None] | None) -> None:
        """`pause`: where it may be, waits on its thread for another turn."""
        self.who = who
        self.left = threading.Event()
        """Nobody waits for it."""
        self.go = threading.Event()
        """It has its next turn, or no more of them: `refusal` says why."""
        self.refusal: RequestError | None = None
        self.has_turn = True
        self._pause = pause
        self._turn_ends = self._ends = 0.0

    def begin(self) -> None:
        """On its thread, as is `look`."""
        now = time.thread_time()
        self._turn_ends, self._ends = now + TURN_S, now + MOST_WORK_S

    def look(self, others_wait: bool) -> None:
        """Pause where its turn is over and others wait. Raises as `go_on`."""
        if self.left.is_set():
            raise Cancelled("nobody waits for this any more")
        now = time.thread_time()
        if now > self._ends:
            raise InvalidRequest(
                f"the request's texts take more than {MOST_WORK_S:g} s of a processor to be tokenised: send fewer or "
                "shorter ones in a request"
            )
        if now > self._turn_ends and others_wait and self._pause is not None:
            self._pause(self)
            self._turn_ends = now + TURN_S


class _Work(threading.local):
    """What this thread does for somebody, and whether others wait."""

    task: _Task | None = None
    others_wait: Callable[[str], bool]


_work = _Work()


def go_on() -> None:
    """Called now and then by what may take long: others have a turn meanwhile. Cancelled where nobody waits for this
    thread's work any more, and InvalidRequest where it has taken too long; on a thread that works for nobody in turns,
    nothing."""
    if (task := _work.task) is not None:
        task.look(_work.others_wait(task.who))


class ThreadsInTurns:
    """Threads that work for clients in turn. Belongs to one event loop."""

    def __init__(
        self, count: int, name: str, most: int, what: str, *, one_by_one: Callable[[], bool] = lambda: False
    ) -> None:
        """`count` works at a time, on threads called `name`_N; of the rest see `Turns`. Of several a work is paused
        where it is long: one client has all but one of `count`, the paused ones among them."""
        self._turns = Turns(most, what, count, one_by_one=one_by_one)
        threads = count if count == 1 else count * (1 + _PAUSED)
        self._begun = Turns(most, what, threads, each=max(1, count - 1))
        self._pauses = threads > count
        self._threads = running_pool(threads, name)

    async def do(self, who: str, make: Callable[[_A], _M], what: _A) -> _M:
        """What `make` makes of `what`, on a thread. Overloaded as of `Turns.take`.

        The thread goes on until it asks whether to (`go_on`) when its client has left, or it has worked for
        MOST_WORK_S.
        """
        await self._begun.take(who)
        try:
            await self._turns.take(who)
        except BaseException:
            self._begun.give_back(who)
            raise
        loop = asyncio.get_running_loop()
        task = _Task(who, partial(self._pause, loop) if self._pauses else None)

        def make_it() -> _M:
            _work.task, _work.others_wait = task, self._turns.others_wait
            task.begin()
            try:
                return make(what)
            finally:
                _work.task = None

        work = loop.run_in_executor(self._threads, make_it)

        def over(work: asyncio.Future[_M]) -> None:
            if task.has_turn:
                self._turns.give_back(who)
            self._begun.give_back(who)
            error = None if work.cancelled() else work.exception()
            if error is not None and not isinstance(error, RequestError):
                # Whoever asked may have left, and then nobody else tells.
                _log.error("work for a request failed", exc_info=error)

        work.add_done_callback(over)
        try:
            return await asyncio.shield(work)
        finally:
            task.left.set()
            del work  # an error of it holds this frame, and would be held by it

    def _pause(self, loop: asyncio.AbstractEventLoop, task: _Task) -> None:
        """On the task's thread: until its next turn. Raises what `Turns.take` does."""
        task.go.clear()
        loop.call_soon_threadsafe(self._give_place, task)
        while not task.go.wait(_LOOK_S):
            if loop.is_closed():
                raise Cancelled("the server has ended")
        if task.refusal is not None:
            raise task.refusal

    def _give_place(self, task: _Task) -> None:
        self._turns.give_back(task.who)
        task.has_turn = False
        again = asyncio.ensure_future(self._turns.take(task.who))

        def given(again: asyncio.Future[None]) -> None:
            error = None if again.cancelled() else again.exception()
            task.has_turn = error is None and not again.cancelled()
            if not task.has_turn:
                task.refusal = error if isinstance(error, RequestError) else Cancelled("the server ends")
            task.go.set()

        again.add_done_callback(given)
