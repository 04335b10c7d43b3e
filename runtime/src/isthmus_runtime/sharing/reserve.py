"""Memory that works on threads may take together: set aside before one begins, given back when it is really over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from .turns import Turns

_LOOK_S = 0.25


class Reserve:
    """Bytes, given to clients in turn. Belongs to one event loop."""

    def __init__(
        self, most: Callable[[], int | None], waiting: int, what: str, crowded: Callable[[], None] = lambda: None
    ) -> None:
        """`most`: bytes that all may have at present; None: any. Whoever asks for more than that is served alone.
        `waiting`: how many may wait, and `what` for, in the refusal of others. `crowded` is called now and then while
        somebody waits."""
        self._crowded = crowded
        self._most = most
        self._door = Turns(waiting, what)
        self._freed: asyncio.Future[None] | None = None
        """What the one at the door waits for."""
        self.used = 0

    async def take(self, who: str, size: int) -> None:
        """Wait until a client may have `size` bytes, until `give_back`. Overloaded (429) as of `Turns.take`."""
        async with self._door.turn(who):
            while self.used and (most := self._most()) is not None and self.used + size > most:
                self._freed = asyncio.get_running_loop().create_future()
                self._crowded()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._freed
            self.used += size

    def give_back(self, size: int) -> None:
        """So many bytes are there again."""
        assert self.used >= size, f"{size} bytes come back, and {self.used} were taken"
        self.used -= size
        if self._freed is not None and not self._freed.done():
            self._freed.set_result(None)
