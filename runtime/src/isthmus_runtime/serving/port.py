"""What the connections of one port share: their books, and who has to go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol, cast

from uvicorn.server import ServerState

from ..errors import Overloaded
from ..sharing.giving_way import Held, who_gives_way
from .admission import BodyBudget, Connections
from .in_flight import InFlight
from .limits import Limits
from .memory import MemoryGuard

_log = logging.getLogger(__name__)

_LEAST_OF_BODIES = 1 << 20
"""Bytes that bodies may always take together."""
_MOST_AT_ONCE = 8
"""One of so many requests at a time, where many that hold little would have to end: what is known of them need not be
what takes the memory."""
_LOOKS = 16
"""What is unread is summed up after each so-manieth part of its bound that was written and not read at once."""


class Connection(Protocol):
    """One of a port, as its books know it (`protocol.py`)."""

    transport: asyncio.Transport

    @property
    def unread(self) -> int:
        """Bytes of answers that wait for the client to read."""

    @property
    def may_end(self) -> bool:
        """Whether there is a request that can end, or an answer that nobody reads."""

    @property
    def who(self) -> str:
        """Whose it is: a tenant's, where its request has told that, or an address."""

    def held(self, beside: Mapping[object, int]) -> int:
        """Bytes that its request is known to take. `beside`: what others than the port count, by task."""

    def give_way(self, error: Overloaded) -> None:
        """Make room for others."""

    def end(self, error: Overloaded) -> None:
        """End what `may_end`, so that its memory comes back: with `error`, where it can still be told."""


class PortState(ServerState):
    """What the connections of one port share."""

    def __init__(self, limits: Limits, memory: MemoryGuard, in_flight: InFlight) -> None:
        """`in_flight`: the requests of the port."""
        super().__init__()
        self.limits = limits
        self.memory = memory
        self.in_flight = in_flight
        self.table: Connections[Connection] = Connections(limits.max_connections, limits.max_connections_per_address)
        self.bodies: BodyBudget[Connection] = BodyBudget(limits.max_body_memory)
        self.leaving = False
        """The next answer on each connection is its last, and says so."""
        self._written = 0
        """Bytes that were not read at once, of what was written since `bound_unread`."""

    def bound_bodies(self) -> None:
        """Now that it is known what requests may take of the memory: bodies have a third of that at most. Each takes
        1.8 times its bytes until it is planned, its connection included."""
        room, asked = self.memory.room, self.limits.max_body_memory
        if room is not None and (most := max(_LEAST_OF_BODIES, room // 3)) < asked:
            self.bodies.bound(most)
            _log.warning(
                "bodies of requests may take %d bytes together, and not the %d of --max-body-memory: the memory limit "
                "leaves %d for requests; lower the one or raise the other",
                most,
                asked,
                room,
            )

    def wrote(self, size: int) -> None:
        """Note so many more bytes that wait to be read; all are looked at by and by."""
        self._written += size
        if self._written > self.limits.max_unread // _LOOKS:
            self.bound_unread()

    def bound_unread(self) -> None:
        """End connections whose clients have most unread until the rest is within its bound: a handler that has
        answered is gone, and whoever reads nothing would keep answers here as long as he likes."""
        self._written = 0
        held = [Held(one.who, one.unread, one) for one in self._all if one.unread]
        most = self.limits.max_unread
        if ended := who_gives_way(held, sum(one.size for one in held) - most):
            _log.warning("ended %d connections whose clients had most unread: more than %d bytes", len(ended), most)
        for one in ended:
            one.what.transport.abort()

    def relieve(self) -> None:
        """Look at the memory of the process, and end requests of which most comes back where that has to be."""
        works = bool(len(self.in_flight) or self.bodies.used)
        if self.memory.due(works=works):
            # Answers that nobody reads are requests', too.
            self.memory.look(idle=not works and not any(one.unread for one in self._all))
        if self.memory.may_end():
            beside = self.memory.beside()
            held = [Held(one.who, one.held(beside), one) for one in self._all if one.may_end]
            for one in who_gives_way(held, self.memory.excess, _MOST_AT_ONCE):
                one.what.end(self.memory.ended(one.size))

    @property
    def _all(self) -> set[Connection]:
        return cast("set[Connection]", self.connections)
