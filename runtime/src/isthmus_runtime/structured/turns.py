"""Whose turn it is at something that serves one at a time: clients in a circle, and each client's own in order."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..errors import Overloaded


class Turns:
    """A lock that nobody gets more of by asking more often. Belongs to one event loop."""

    def __init__(self, most: int, what: str) -> None:
        """`most`: how many may wait. `what` they wait for, in the refusal of others."""
        self._most = most
        self._what = what
        self._taken = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By client, the next one first."""

    @asynccontextmanager
    async def turn(self, who: str) -> AsyncIterator[None]:
        """Wait for a turn of client `who`, and have it for the block.

        Overloaded (429) when too many wait; also later, for the last of the client that has most of them waiting, to
        make room for another client.
        """
        if self._taken:
            await self._wait(who)
        self._taken = True
        try:
            yield
        finally:
            self._give_on()

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
                self._give_on()  # it was given the turn, and has left
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
        while self._waiting:
            who, queue = next(iter(self._waiting.items()))
            future = queue.popleft()
            if not queue:
                del self._waiting[who]
            if not future.done():
                if queue:
                    self._waiting.move_to_end(who)
                future.set_result(None)
                return
        self._taken = False

    def _forget(self, who: str, future: asyncio.Future[None]) -> None:
        queue = self._waiting.get(who, deque())
        if future in queue:
            queue.remove(future)
        if not queue:
            self._waiting.pop(who, None)
