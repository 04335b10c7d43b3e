"""Large answers as bytes: a few at a time, in turns of clients, and each as little at a time as can be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from ..sharing.threads_in_turns import ThreadsInTurns, go_on

_PLACES = 2
_MOST_WAITING = 4096
_M = TypeVar("_M")


class Writers:
    """Of one server. Belongs to one event loop."""

    def __init__(self) -> None:
        self._threads = ThreadsInTurns(_PLACES, "write", _MOST_WAITING, "large answers wait to be written")

    async def do(self, who: str, make: Callable[[], _M]) -> _M:
        """What `make` makes for a client, on a thread. Raises as `ThreadsInTurns.do`."""
        return await self._threads.do(who, lambda _: make(), None)

    async def joined(self, who: str, pieces: Callable[[], Iterable[bytes]]) -> bytes:
        """The pieces as one; others may have a turn between two. Raises as `do`."""

        def make() -> bytes:
            parts = []
            for piece in pieces():
                parts.append(piece)
                go_on()
            return b"".join(parts)

        return await self.do(who, make)
