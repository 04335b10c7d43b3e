"""Memory that works on threads may take together: set aside before one begins, given back when it is really over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from .shares import Shares
from .threads_in_turns import MOST_HELD_S, ThreadsInTurns
from .turns import Turns

_LOOK_S = 0.25


@dataclass(frozen=True, eq=False, slots=True)
class SetAside:
    """Bytes that a client has of a reserve."""

    of: Reserve
    who: str
    size: int

    def give_back(self) -> None:
        """They are there again; once."""
        self.of.give_back(self)


@dataclass(frozen=True, eq=False, slots=True)
class _Waiter:
    wants: SetAside
    served: asyncio.Future[None]


class Reserve:
    """Bytes, given to clients in turn. Belongs to one event loop."""

    def __init__(
        self,
        most: Callable[[], int | None],
        waiting: int,
        what: str,
        works: ThreadsInTurns | None = None,
        held_s: float = MOST_HELD_S,
    ) -> None:
        """`most`: bytes that all may have at present; None: any. One client has half of it, or one piece of any size:
        what is larger than all is served alone. `waiting`: how many may wait, and `what` for, in the refusal of others.
        Of the `works` that have some of it one ends while another client waits for it, once it has worked for
        `held_s`."""
        self._most = most
        self._works, self._held_s = works, held_s
        self._door = Turns(waiting, what, waiting, each=1)
        self._next: list[_Waiter] = []
        """One of each client, in the order of their coming."""
        self._of_client = Shares()

    @property
    def used(self) -> int:
        """Bytes that all works have."""
        return self._of_client.all

    async def take(self, who: str, size: int) -> SetAside:
        """Wait until a client may have `size` bytes, until they are given back. Overloaded (429) as of `Turns.take`."""
        async with self._door.turn(who):
            waiter = _Waiter(SetAside(self, who, size), asyncio.get_running_loop().create_future())
            self._next.append(waiter)
            try:
                first = self._serve()
                while not waiter.served.done():
                    if first is waiter and self._works is not None:
                        self._works.make_way(self, self._held_s)
                    await asyncio.wait((waiter.served,), timeout=_LOOK_S)
                    first = self._serve()  # `most` may be another
            except asyncio.CancelledError:
                if waiter.served.done():
                    waiter.wants.give_back()
                else:
                    self._next.remove(waiter)
                    self._serve()
                raise
            return waiter.wants

    def give_back(self, part: SetAside) -> None:
        """A client's bytes are there again."""
        self._of_client.add(part.who, -part.size)
        self._serve()

    def _serve(self) -> _Waiter | None:
        """Whoever fits now has it. The first who waits for what others have: nobody behind overtakes that one."""
        for waiter in list(self._next):
            wants, most = waiter.wants, self._most()
            if most is not None and self.used:
                has = self._of_client[wants.who]
                if has and has + wants.size > most // 2:
                    continue
                if self.used + wants.size > most:
                    return waiter
            self._next.remove(waiter)
            self._of_client.add(wants.who, wants.size)
            waiter.served.set_result(None)
        return None
