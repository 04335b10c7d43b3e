"""Turns at judging reviews: one at a time, and nobody's many hold up another's one.

All reviews come from the API server, which is one address: 150 dry runs of one tenant kept all others' creates waiting
until they had failed. A review says for which namespace it is, and a tenant has few of them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

MOST_BYTES = 2 * 1024 * 1024
"""Of an address, that wait."""
LEAST_BYTES = 64 * 1024
"""As how many a review counts at least."""


class Busy(Exception):
    """Too many wait, and of nobody more than of this namespace."""


@dataclass(slots=True, eq=False)
class _Waiting:
    address: str
    namespace: str
    size: int
    turn: asyncio.Future[None]


class Turns:
    """Belongs to one event loop. Next is the address that was served longest ago, of it the namespace."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []
        self._working: _Waiting | None = None
        self._served: dict[tuple[str, ...], int] = {}
        """When addresses, and namespaces of them, had their last turn, as long as some of them wait."""
        self._count = 0

    @asynccontextmanager
    async def turn(self, address: str, namespace: str, size: int) -> AsyncIterator[None]:
        """Wait for it. `size`: bytes of the review. Busy: it gives way, now or later."""
        mine = _Waiting(address, namespace, max(size, LEAST_BYTES), asyncio.get_running_loop().create_future())
        self._waiting.append(mine)
        self._make_room(address)
        self._next()
        try:
            await mine.turn
            yield
        finally:
            if self._working is mine:
                self._working = None
                self._next()
            elif mine in self._waiting:
                self._waiting.remove(mine)

    def _make_room(self, address: str) -> None:
        """The newest leave of the namespace of which most wait, until what waits of the address is within its bound."""
        while True:
            sizes: Counter[str] = Counter()
            for one in self._waiting:
                if one.address == address:
                    sizes[one.namespace] += one.size
            if sizes.total() <= MOST_BYTES:
                return
            most, size = sizes.most_common(1)[0]
            if size <= LEAST_BYTES:
                return  # one small review of each: the door bounds how many these are
            last = max(i for i, one in enumerate(self._waiting) if (one.address, one.namespace) == (address, most))
            leaves = self._waiting.pop(last)
            if not leaves.turn.done():  # it may just have left
                leaves.turn.set_exception(Busy())

    def _next(self) -> None:
        while self._working is None and self._waiting:
            known = {place for one in self._waiting for place in _places(one)}
            self._served = {place: at for place, at in self._served.items() if place in known}
            mine = min(self._waiting, key=lambda one: [self._served.get(place, 0) for place in _places(one)])
            self._count += 1
            self._served.update(dict.fromkeys(_places(mine), self._count))
            self._waiting.remove(mine)
            if not mine.turn.done():
                self._working = mine
                mine.turn.set_result(None)


def _places(one: _Waiting) -> tuple[tuple[str, ...], ...]:
    return (one.address,), (one.address, one.namespace)
