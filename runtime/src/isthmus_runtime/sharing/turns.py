"""Whose turn it is at something that serves few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ..errors import Overloaded
from .circle import Circle
from .shares import Shares


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
        self._having = Shares()
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
        self._having.add(who, -1)
        while self._give_one():  # several where there was one place for a while
            pass

    def others_wait(self, who: str) -> bool:
        """Whether somebody but client `who` does. From any thread."""
        return self._first.others(who) or self._again.others(who)

    def _may(self, who: str) -> bool:
        places = 1 if self._one_by_one() else self._places
        each = min(self._each or places, max(1, places - 1))
        return self._having.all < places and self._having[who] < each

    def _give(self, who: str, again: bool) -> None:
        self._having.add(who, 1)
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
