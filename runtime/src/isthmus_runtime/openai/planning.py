"""Where jobs are made of bodies: short ones on the event loop, long ones on threads, and large ones there once memory
is set aside for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ..serving.limits import BodyTooLarge
from ..serving.memory import MemoryGuard
from ..sharing.loop_share import LoopShare
from ..sharing.reserve import Reserve, SetAside
from ..sharing.threads_in_turns import MOST_HELD_S, ThreadsInTurns
from ..sharing.turns import Turns
from ..threads import processors
from ..tokenising import AT_ONCE, LARGE

_MOST_COMPUTING = 64
"""Requests without an engine that wait for their turn."""
_MOST_PLANNING, _PLACES = 1024, min(16, max(4, processors()))
"""Long requests that wait to be planned, and how many are at a time."""
_SMALL_HELD_S = 3.0
"""As MOST_HELD_S, of the bodies that have little of it: their texts take two seconds at most, but for odd ones."""
_WAIT_TO_COMPUTE = "requests of this kind wait for their turn"
_WAIT = "large bodies wait to be planned"
_OF_A_BYTE = 26
"""Bytes that planning takes at most for each of a body, as JSON, marked, rendered and made bare again
(tests/hostile)."""

_M = TypeVar("_M")


class Planning:
    """Plans the requests of one process, in turns of clients. Belongs to its event loop."""

    def __init__(self, memory: MemoryGuard) -> None:
        self._memory = memory
        self._short = LoopShare()
        # What a thread has begun cannot be ended: generations have others than what no engine is asked for.
        # Large ones have threads of their own, of which one client has one: a megabyte of digits takes seconds, in one
        # piece.
        self._computing = ThreadsInTurns(1, "compute", _MOST_COMPUTING, _WAIT_TO_COMPUTE, pauses=True)
        self._computing_large = ThreadsInTurns(2, "compute-large", _MOST_COMPUTING, _WAIT_TO_COMPUTE, pauses=False)
        self._may_compute = Turns(_MOST_COMPUTING, _WAIT_TO_COMPUTE, 2)
        self._planners = ThreadsInTurns(
            _PLACES,
            "plan",
            _MOST_PLANNING,
            "long prompts and batches wait to be planned",
            one_by_one=lambda: memory.tight,
        )
        # Two, so that many small ones and few large ones do not wait for each other.
        self._small, self._large = (
            Reserve(partial(_share, memory, quarters), _MOST_PLANNING, _WAIT, self._planners, held_s)
            for quarters, held_s in ((1, _SMALL_HELD_S), (3, MOST_HELD_S))
        )
        memory.add_reserve(lambda: self._small.used + self._large.used)

    async def short(self, who: str, plan: Callable[[], _M]) -> _M:
        """What `plan` makes, here and now, or in a turn of the event loop that has room for it."""
        await self._short.room(who)
        return self._short.spend(plan)

    async def long(self, who: str, plan: Callable[[bytes], _M], body: bytes) -> _M:
        """What `plan` makes of a long body, in a thread: few at a time, in turns of clients, of whom none takes all
        threads. Overloaded (429) when too many wait."""
        if len(body) <= LARGE:
            return await self._planners.do(who, plan, body)
        return await self._with_memory(self._planners, who, plan, body)

    async def alone(self, who: str, make: Callable[[bytes], _M], body: bytes) -> _M:
        """What `make` makes of a body that no engine is asked for, one at a time, and two large ones beside it. Raises
        as `long`."""
        if len(body) <= LARGE:
            return await self._computing.do(who, make, body)
        async with self._may_compute.turn(who):  # before memory is set aside: there are two threads
            return await self._with_memory(self._computing_large, who, make, body)

    async def _with_memory(self, threads: ThreadsInTurns, who: str, make: Callable[[bytes], _M], body: bytes) -> _M:
        """What `make` makes of a large body when there is memory for it."""
        part = await self._set_aside(who, body)
        return await threads.do(who, make, body, part)

    async def _set_aside(self, who: str, body: bytes) -> SetAside:
        """Wait until what is made of a body may take is there, to be given back when it is over. BodyTooLarge: it will
        never be."""
        most = self._memory.room_on_the_way
        if most is not None and _OF_A_BYTE * len(body) > most:
            raise BodyTooLarge(
                f"the body has {len(body)} bytes, and what is made of each may take {_OF_A_BYTE} on its way: the "
                f"memory limit leaves room for {most // _OF_A_BYTE}; send less, or raise --memory-limit"
            )
        takes, share = planning_takes(len(body)), _share(self._memory, 1)
        # One client has half of the small one, so that there is room for what another one has there.
        reserve = self._small if share is None or takes <= share // 2 else self._large
        part = await reserve.take(who, takes)
        try:
            self._memory.look()
            self._memory.check_new()
            await self._memory.make_room(takes)
        except BaseException:
            part.give_back()
            raise
        return part


def _share(memory: MemoryGuard, quarters: int) -> int | None:
    """So many of what may be taken on the way; None: anything."""
    room = memory.room_on_the_way
    return None if room is None else quarters * room // 4


def planning_takes(size: int) -> int:
    """Bytes that planning a body of so many may take on its way."""
    return AT_ONCE + _OF_A_BYTE * size
