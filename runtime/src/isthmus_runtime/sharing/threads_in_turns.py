"""Threads that work for clients in turn, a bounded time for each: what is long is paused where others wait."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from ..errors import Cancelled, InvalidRequest, Overloaded, RequestError, unforeseen
from ..threads import running_pool
from .turns import Turns

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


class _Task:
    """What a thread does for somebody, in one turn or several."""

    def __init__(self, who: str, places: _Places | None) -> None:
        """`places`: where it may be paused."""
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
        self.set_aside = 0
        """Bytes, of its part."""
        self._places = places
        self._elsewhere_s = 0.0
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
        self.worked_s = now - self._began + self._elsewhere_s
        if self.worked_s > MOST_WORK_S:
            raise InvalidRequest(
                f"the request's texts take more than {MOST_WORK_S:g} s of a processor to be tokenised: send fewer or "
                "shorter ones in a request"
            )
        if now > self._turn_ends and others_wait and self.leave():
            self.back()

    def leave(self) -> bool:
        """Give its place to others, where it may be paused; whether it has."""
        if self._places is not None:
            self._places.leave(self)
        return self._places is not None

    def back(self) -> None:
        """Wait for another turn. Raises as `check`."""
        assert self._places is not None, "it has left"
        self._places.wait(self)
        self._turn_ends = time.thread_time() + TURN_S

    def spent(self, seconds: float) -> None:
        """Of a processor, by another process for this work."""
        self._elsewhere_s += seconds
        self.worked_s += seconds

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


@contextmanager
def away() -> Iterator[Callable[[], None]]:
    """While this thread waits for another process: others have its place, which it waits for at the end. Yields what is
    called now and then meanwhile: Cancelled and Overloaded as of `go_on`."""
    task = _work.task
    if task is None:
        yield lambda: None
        return
    left = task.leave()
    yield task.check
    if left:
        task.back()


def whose() -> str:
    """Whom this thread works for; empty where that is nobody."""
    return "" if _work.task is None else _work.task.who


def set_aside() -> int:
    """Bytes that are set aside for what this thread works on."""
    return 0 if _work.task is None else _work.task.set_aside


def spent(seconds: float) -> None:
    """Of a processor, by another process for what this thread works on."""
    if _work.task is not None:
        _work.task.spent(seconds)


class Part(Protocol):
    """What a work has of something."""

    @property
    def of(self) -> object:
        """Of what: as `make_way` is asked."""

    @property
    def size(self) -> int:
        """Bytes."""

    def give_back(self) -> None:
        """Called once."""


class ThreadsInTurns:
    """Threads that work for clients in turn. Belongs to one event loop."""

    def __init__(
        self,
        count: int,
        name: str,
        most: int,
        what: str,
        *,
        one_by_one: Callable[[], bool] = lambda: False,
        pauses: bool | None = None,
    ) -> None:
        """`count` works at a time, on threads called `name`_N; of the rest see `Turns`. Of several a work is paused
        where it is long: one client has all but one of `count`, the paused ones among them. Where too many are paused,
        the client whose works have taken most loses the longest: those who come find no threads taken.
        Without `pauses` a work has one turn; None: of one place alone it has, of several it may have more."""
        pauses = count > 1 if pauses is None else pauses
        self._turns = Turns(most, what, count, one_by_one=one_by_one)
        self._begun = Turns(most, what, _ANY if pauses or count > 1 else 1, each=max(1, count - 1))
        self._paused, self._most_paused = (count * _PAUSED, count * _MOST_PAUSED) if pauses else (0, 0)
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
        task = _Task(who, _Places(self, loop) if self._most_paused else None)

        def make_it() -> _M:
            _work.task, _work.others_wait = task, self._turns.others_wait
            task.begin()
            try:
                return make(what)
            finally:
                _work.task = None

        if part is not None:
            self._holding[task] = part
            task.set_aside = part.size
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

    def give_place(self, task: _Task) -> None:
        """Of a task that is paused, to others. On the event loop."""
        self._turns.give_back(task.who, again=task.long)
        task.has_turn = False
        task.long = True
        self._long.add(task)
        self._make_way()

    def take_place(self, task: _Task) -> None:
        """Its next turn, or what it is to end with: `go` tells its thread. On the event loop."""
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


class _Places:
    """Of threads: a task that may be paused has one of them."""

    def __init__(self, threads: ThreadsInTurns, loop: asyncio.AbstractEventLoop) -> None:
        self._threads, self._loop = threads, loop

    def leave(self, task: _Task) -> None:
        """Others may have its place. On its thread, as is `wait`."""
        self._loop.call_soon_threadsafe(self._threads.give_place, task)

    def wait(self, task: _Task) -> None:
        """Until it has one again. Raises what it is to end with."""
        task.go.clear()
        self._loop.call_soon_threadsafe(self._threads.take_place, task)
        while not task.go.wait(_LOOK_S):
            if self._loop.is_closed():
                raise Cancelled("the server has ended")
        task.check()


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
