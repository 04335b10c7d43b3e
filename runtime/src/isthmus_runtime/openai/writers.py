"""Answers as bytes: small ones at once, of large ones a few at a time, in turns of clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from ..sharing.threads_in_turns import ThreadsInTurns, go_on

_PLACES = 2
_MOST_WAITING = 4096
_M = TypeVar("_M")


class Writers:
    """Writes the answers of one server. Belongs to one event loop."""

    def __init__(self) -> None:
        self._threads = ThreadsInTurns(_PLACES, "write", _MOST_WAITING, "large answers wait to be written")

    async def do(self, who: str, make: Callable[[], _M], *, large: bool) -> _M:
        """What `make` makes for a client: here and now, or, what is large (10 ms of work), on a thread. Raises as
        `ThreadsInTurns.do`."""
        return await self._threads.do(who, lambda _: make(), None) if large else make()

    async def joined(self, who: str, pieces: Callable[[], Iterable[bytes]], *, large: bool) -> bytes:
        """The pieces as one; of what is large others may have a turn between two. Raises as `do`."""
        if not large:
            return b"".join(pieces())

        def make() -> bytes:
            parts = []
            for piece in pieces():
                parts.append(piece)
                go_on()
            return b"".join(parts)

        return await self.do(who, make, large=True)
