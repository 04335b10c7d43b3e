"""What a port takes on at a time: connections, and bytes of bodies. Pure: who has to give way comes out."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from ..sharing.shares import Shares

_C = TypeVar("_C")

DESCRIPTORS_KEPT = 64
"""Descriptors of a process for everything but its clients: files, listeners, event loops, probes of engines."""
DESCRIPTORS_EACH = 3
"""Of a client's connection: its own, and one to each engine of a pair."""
_FEWEST = 8


def connections_within(descriptors: int) -> int:
    """How many connections leave a process that may open `descriptors` enough of them to answer on each."""
    return max(_FEWEST, (descriptors - DESCRIPTORS_KEPT) // DESCRIPTORS_EACH)


class Connections(Generic[_C]):
    """Bounds connections, in total and of one address.

    A connection waits, or its request is being answered. Where there is no room for another, the one that has waited
    longest gives way: silence must not keep those out who ask for something.
    """

    def __init__(self, most: int, most_of_an_address: int) -> None:
        self.most = most
        self.most_of_an_address = most_of_an_address
        self._address: dict[_C, str] = {}
        self._of_address = Shares()
        self._waiting: OrderedDict[_C, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._address)

    def add(self, connection: _C, address: str) -> _C | None:
        """Count a new connection, which waits. Returns who must be closed, perhaps itself; that one is not counted."""
        if self._of_address[address] >= self.most_of_an_address:
            return connection
        leaver = None
        if len(self._address) >= self.most:
            leaver = next(iter(self._waiting), connection)
            if leaver is connection:
                return connection
            self.remove(leaver)
        self._address[connection] = address
        self._of_address.add(address, 1)
        self._waiting[connection] = None
        return leaver

    def waits(self, connection: _C) -> None:
        """From now on, for its next request or for the rest of one."""
        if connection in self._address:
            self._waiting[connection] = None
            self._waiting.move_to_end(connection)

    def works(self, connection: _C) -> None:
        """Note that it has a whole request, which is being answered."""
        self._waiting.pop(connection, None)

    def remove(self, connection: _C) -> None:
        """Forget one that is gone. Idempotent."""
        address = self._address.pop(connection, None)
        if address is None:
            return
        self._waiting.pop(connection, None)
        self._of_address.add(address, -1)


class BodyBudget(Generic[_C]):
    """Bounds the bytes of all bodies that arrive or are not planned yet. What is kept of them afterwards, its handler
    counts.

    Where there are more, one that is not here whole gives way, the largest of the address that has most: who sends
    little is served beside those who send much, or who never finish. Of one address all together may have three
    quarters, however whole they are.
    """

    def __init__(self, most: int) -> None:
        self.used = 0
        self.bound(most)
        self._held: dict[_C, int] = {}
        self._arriving: set[_C] = set()
        self._addresses: dict[_C, str] = {}
        self._of = Shares()
        self._greedy: set[str] = set()
        """Addresses that have more than their share."""

    def bound(self, most: int) -> None:
        """Bound all bodies by so many bytes from now on. Nobody gives way for that before the next one comes."""
        self.most = most
        self._share = most - most // 4

    def add(self, holder: _C, size: int, address: str = "") -> _C | None:
        """Count `size` more bytes of a body that arrives from an address (empty: not known, and without a share).
        Returns who must be refused, until it is None: its bytes are no longer counted."""
        self.used += size
        self._held[holder] = self._held.get(holder, 0) + size
        self._arriving.add(holder)
        if address:
            self._addresses[holder] = address
            self._count(address, size)
        return self.excess()

    def excess(self) -> _C | None:
        """Who must be refused now."""
        candidates = self._arriving if self.used > self.most else set[_C]()
        if not candidates and self._greedy:
            candidates = {one for one in self._arriving if self._addresses.get(one) in self._greedy}
        if not candidates:
            return None
        address_of = self._addresses.get
        most = max(set(map(address_of, candidates)), key=lambda address: self._of[address or ""])
        leaver = max((one for one in candidates if address_of(one) == most), key=self._held.__getitem__)
        self.release(leaver)
        return leaver

    def of(self, holder: _C) -> int:
        """Bytes that are counted for it."""
        return self._held.get(holder, 0)

    def arrived(self, holder: _C) -> None:
        """The body is here whole."""
        self._arriving.discard(holder)

    def release(self, holder: _C) -> None:
        """Its bytes are no longer needed. Idempotent."""
        size = self._held.pop(holder, 0)
        self.used -= size
        self._arriving.discard(holder)
        if (address := self._addresses.pop(holder, "")) != "":
            self._count(address, -size)

    def release_part(self, holder: _C, size: int) -> None:
        """Give back so many of its bytes; it is arriving, or not, as before."""
        held = self._held.get(holder, 0)
        if size >= held:
            self.release(holder)
            return
        self._held[holder] = held - size
        self.used -= size
        if (address := self._addresses.get(holder, "")) != "":
            self._count(address, -size)

    def _count(self, address: str, size: int) -> None:
        self._of.add(address, size)
        if self._of[address] > self._share:
            self._greedy.add(address)
        else:
            self._greedy.discard(address)
