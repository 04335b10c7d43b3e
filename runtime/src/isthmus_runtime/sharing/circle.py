"""Who waits for something: clients in a circle, each client's own in order."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

from ..errors import RequestError


class Circle:
    """Futures of clients. Belongs to one event loop."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By client, the next one first."""

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __bool__(self) -> bool:
        return bool(self._queues)

    def others(self, who: str) -> bool:
        """Whether somebody but client `who` waits. From any thread."""
        return len(self._queues) > (who in self._queues)

    def add(self, who: str) -> asyncio.Future[None]:
        """Add one that waits, of client `who`; it waits for what is returned."""
        future = asyncio.get_running_loop().create_future()
        self._queues.setdefault(who, deque()).append(future)
        return future

    def forget(self, who: str, future: asyncio.Future[None]) -> None:
        """Forget one that has left, or was refused."""
        queue = self._queues.get(who, deque())
        if future in queue:
            queue.remove(future)
        if not queue:
            self._queues.pop(who, None)

    def make_room(self, who: str, error: RequestError) -> None:
        """End the last of the client that has most, or raise `error` where that would be `who`."""
        longest = max(self._queues, key=lambda name: len(self._queues[name]))
        if len(self._queues[longest]) < len(self._queues.get(who, ())) + 2:
            raise error
        leaver = self._queues[longest].pop()
        if not leaver.done():  # it may have left by itself a moment ago
            leaver.set_exception(error)

    def give(self, may: Callable[[str], bool] = lambda who: True) -> str | None:
        """The next client of those who `may`, which waits no longer; None: there is none."""
        while (who := next(filter(may, self._queues), None)) is not None:
            queue = self._queues[who]
            future = queue.popleft()
            if queue:
                self._queues.move_to_end(who)
            else:
                del self._queues[who]
            if not future.done():  # it has not left
                future.set_result(None)
                return who
        return None
