"""Whose turn it is at something that serves few at a time: clients in a circle, and each client's own in order."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol, TypeVar

from ..errors import Cancelled, InvalidRequest, Overloaded, RequestError, unforeseen
from ..threads import running_pool
from .circle import Circle

_log = logging.getLogger(__name__)
MOST_WORK_S = 60.0
"""Of a processor, that a thread works for one request. The longest texts that are taken need a sixth of it, and more
where processors are slow."""
TURN_S = 0.25
"""Of a processor, after which others who wait have the place, and the rest of the work another turn."""
FAIR_WORK_S = 2.0
"""Of a processor, after which a work ends where more than `_PAUSED` are paused."""
MOST_HELD_S = 10.0
"""Of a processor, after which a work ends where others wait for its memory: a batch of megabytes takes some seconds."""
_PAUSED, _MOST_PAUSED = 3, 8
"""Works that may be paused, for each place: threads that wait."""
_LOOK_S = 1.0
_ANY = 1 << 30
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
        self._first, self._again = Circle(), Circle()
        self._going_on = 0
        """Turns had now by who had one before."""
        self._went_on = False
        """The last turn that was given was such a one."""

    @asynccontextmanager
    async def turn(self, who: str) -> AsyncIterator[None]:
        """Wait for a turn of client `who`, and have it for the block. Overloaded as of `take`."""
        await self.take(who)
        try:
            yield
        finally:
            self.give_back(who)

    async def take(self, who: str, *, again: bool = False) -> None:
        """Wait for a turn of client `who`, and have it until `give_back`. `again`: to go on with what had a turn
        before; of several places one is for those, and in the others they come after all who have not begun.

        Overloaded (429) when too many wait; also later, for the last of the client that has most of them waiting, to
        make room for another client. Not `again`.
        """
        if self._may(who):
            self._give(who, again)
            return
        circle = self._again if again else self._first
        if not again and len(circle) >= self._most:
            circle.make_room(who, Overloaded(f"{len(circle)} {self._what}; retry later", status=429))
        future = circle.add(who)
        try:
            await future
        except asyncio.CancelledError:
            if future.cancelled() or future.exception():
                circle.forget(who, future)
            else:
                self.give_back(who, again=again)  # it was given the turn, and has left
            raise

    def give_back(self, who: str, *, again: bool = False) -> None:
        """A turn of client `who`, taken as `again` says, is over: the next one begins."""
        self._going_on -= again
        self._having[who] -= 1
        if not self._having[who]:
            del self._having[who]
        while self._give_one():  # several where there was one place for a while
            pass

    def others_wait(self, who: str) -> bool:
        """Whether somebody but client `who` does. From any thread."""
        return self._first.others(who) or self._again.others(who)

    def _may(self, who: str) -> bool:
        places = 1 if self._one_by_one() else self._places
        each = min(self._each or places, max(1, places - 1))
        return self._having.total() < places and self._having[who] < each

    def _give(self, who: str, again: bool) -> None:
        self._having[who] += 1
        self._going_on += again
        self._went_on = again

    def _give_one(self) -> bool:
        one_place = self._places == 1 or self._one_by_one()
        again_first = not self._went_on if one_place else not self._going_on
        for again in (True, False) if again_first else (False, True):
            who = (self._again if again else self._first).give(self._may)
            if who is not None:
                self._give(who, again)
                return True
        return False


class _Task:
    """What a thread does for somebody, in one turn or several."""

    def __init__(self, who: str, pause: Callable[[_Task], None] | None) -> None:
        """`pause`: where it may be, waits on its thread for another turn."""
        self.who = who
        self.go = threading.Event()
        """It has its next turn, or is to end."""
        self.ending = False
        self.has_turn = True
        self.again: asyncio.Future[None] | None = None
        """Its next turn, while it is paused."""
        self.long = False
        """It has been paused."""
        self.worked_s = 0.0
        """Of a processor, when it last looked."""
        self._pause = pause
        self._why: RequestError | None = None
        self._began = self._turn_ends = 0.0

    def begin(self) -> None:
        """On its thread, as are `look` and `check`."""
        self._began = time.thread_time()
        self._turn_ends = self._began + TURN_S

    def look(self, others_wait: bool) -> None:
        """Pause where its turn is over and others wait. Raises as `go_on`."""
        self.check()
        now = time.thread_time()
        self.worked_s = now - self._began
        if self.worked_s > MOST_WORK_S:
            raise InvalidRequest(
                f"the request's texts take more than {MOST_WORK_S:g} s of a processor to be tokenised: send fewer or "
                "shorter ones in a request"
            )
        if now > self._turn_ends and others_wait and self._pause is not None:
            self._pause(self)
            self._turn_ends = now + TURN_S

    def check(self) -> None:
        """Raises what it is to end with."""
        if self.ending:
            raise self._reason()

    def end(self, why: RequestError) -> None:
        """Where it looks next, or at once where it is paused. On the event loop."""
        if not self.ending:
            self._why, self.ending = why, True
        if self.again is not None:
            self.again.cancel()

    def _reason(self) -> RequestError:
        # Its traceback will hold the task, which is not to hold it: a cycle, with a body in its frames.
        why, self._why = self._why, None
        assert why is not None
        return why


class _Work(threading.local):
    """What this thread does for somebody, and whether others wait."""

    task: _Task | None = None
    others_wait: Callable[[str], bool]


_work = _Work()


def go_on() -> None:
    """Called now and then by what may take long: others have a turn meanwhile. Cancelled where nobody waits for this
    thread's work any more, InvalidRequest where it has taken too long, Overloaded (429) where too many long ones are
    begun and its client's have taken most; on a thread that works for nobody in turns, nothing."""
    if (task := _work.task) is not None:
        task.look(_work.others_wait(task.who))


class Part(Protocol):
    """What a work has of something."""

    @property
    def of(self) -> object:
        """Of what: as `make_way` is asked."""

    def give_back(self) -> None:
        """Called once."""


class ThreadsInTurns:
    """Threads that work for clients in turn. Belongs to one event loop."""

    def __init__(
        self, count: int, name: str, most: int, what: str, *, one_by_one: Callable[[], bool] = lambda: False
    ) -> None:
        """`count` works at a time, on threads called `name`_N; of the rest see `Turns`. Of several a work is paused
        where it is long: one client has all but one of `count`, the paused ones among them. Where too many are paused,
        the client whose works have taken most loses the longest: those who come find no threads taken."""
        self._turns = Turns(most, what, count, one_by_one=one_by_one)
        self._begun = Turns(most, what, count if count == 1 else _ANY, each=max(1, count - 1))
        self._paused, self._most_paused = (0, 0) if count == 1 else (count * _PAUSED, count * _MOST_PAUSED)
        self._threads = running_pool(count + self._most_paused, name)
        self._long: set[_Task] = set()
        self._holding: dict[_Task, Part] = {}

    async def do(self, who: str, make: Callable[[_A], _M], what: _A, part: Part | None = None) -> _M:
        """What `make` makes of `what`, on a thread. Overloaded as of `Turns.take`.

        The thread goes on until it asks whether to (`go_on`) when its client has left, or it has worked for
        MOST_WORK_S. `part` is given back when the thread has ended it, or it is sure that none begins it.
        """
        try:
            await self._begun.take(who)
            try:
                await self._turns.take(who)
            except BaseException:
                self._begun.give_back(who)
                raise
        except BaseException:
            if part is not None:
                part.give_back()
            raise
        loop = asyncio.get_running_loop()
        task = _Task(who, partial(self._pause, loop) if self._most_paused else None)

        def make_it() -> _M:
            _work.task, _work.others_wait = task, self._turns.others_wait
            task.begin()
            try:
                return make(what)
            finally:
                _work.task = None

        if part is not None:
            self._holding[task] = part
        work = loop.run_in_executor(self._threads, make_it)

        def over(work: asyncio.Future[_M]) -> None:
            self._long.discard(task)
            if task.has_turn:
                self._turns.give_back(who, again=task.long)
            self._begun.give_back(who)
            if part is not None:
                del self._holding[task]
                part.give_back()
            error = None if work.cancelled() else work.exception()
            if error is not None and not isinstance(error, RequestError):
                # Whoever asked may have left, and then nobody else tells.
                _log.error("work for a request failed", exc_info=error)

        work.add_done_callback(over)
        try:
            return await asyncio.shield(work)
        finally:
            task.end(Cancelled("nobody waits for this any more"))
            del work  # an error of it holds this frame, and would be held by it

    def _pause(self, loop: asyncio.AbstractEventLoop, task: _Task) -> None:
        """On the task's thread: until its next turn. Raises what `Turns.take` does."""
        task.go.clear()
        loop.call_soon_threadsafe(self._give_place, task)
        while not task.go.wait(_LOOK_S):
            if loop.is_closed():
                raise Cancelled("the server has ended")
        task.check()

    def _give_place(self, task: _Task) -> None:
        self._turns.give_back(task.who, again=task.long)
        task.has_turn = False
        task.long = True
        self._long.add(task)
        task.again = again = asyncio.ensure_future(self._turns.take(task.who, again=True))

        def given(again: asyncio.Future[None]) -> None:
            task.again = None
            error = Cancelled("the server ends") if again.cancelled() else again.exception()
            task.has_turn = error is None
            if error is not None:
                task.end(error if isinstance(error, RequestError) else unforeseen(error))
            task.go.set()

        again.add_done_callback(given)
        if task.ending:  # it left as it paused
            again.cancel()
        self._make_way()

    def _make_way(self) -> None:
        going_on = [task for task in self._long if not task.ending]
        crowded = len(going_on) > self._most_paused
        may_end = [task for task in going_on if crowded or task.worked_s > FAIR_WORK_S]
        if len(going_on) <= self._paused or not may_end:
            return
        longest = _longest(may_end, going_on)
        longest.end(_too_long(len(going_on), longest))

    def make_way(self, of: object, held_s: float = MOST_HELD_S) -> None:
        """Somebody waits for parts of it: of the works that have one the longest ends, of the client whose have taken
        most, if it has worked for `held_s`."""
        holding = [task for task, part in self._holding.items() if part.of is of and not task.ending]
        may_end = [task for task in holding if task.worked_s > held_s]
        if may_end:
            longest = _longest(may_end, holding)
            longest.end(_too_long(len(holding), longest))


def _longest(may_end: Sequence[_Task], tasks: Sequence[_Task]) -> _Task:
    """Of the client whose `tasks` have taken most."""
    taken_s: defaultdict[str, float] = defaultdict(float)
    for task in tasks:
        taken_s[task.who] += task.worked_s
    return max(may_end, key=lambda task: (taken_s[task.who], task.worked_s))


def _too_long(count: int, task: _Task) -> Overloaded:
    return Overloaded(
        f"{count} requests have long texts, and those of this one have taken {task.worked_s:.1f} s of a processor "
        "until now: send fewer or shorter ones in a request, or retry later",
        status=429,
    )
