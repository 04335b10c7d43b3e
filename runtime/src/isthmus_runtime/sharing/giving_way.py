"""Who gives way where all hold more than there is: the largest of the client that has most. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heapreplace
from typing import Generic, NamedTuple, TypeVar

_T = TypeVar("_T")


class Held(NamedTuple, Generic[_T]):
    """What something is known to hold."""

    client: str
    size: int
    """Of bytes, or whatever else is counted."""
    what: _T


def who_gives_way(held: Iterable[Held[_T]], excess: int, part: int = 1) -> list[Held[_T]]:
    """What ends, so that `excess` comes back: the largest of the client that has most, then again; nothing where
    that is not above 0. Of many one in `part` at most, but one at least."""
    if excess <= 0:
        return []
    of_client: dict[str, list[Held[_T]]] = {}
    for one in held:
        of_client.setdefault(one.client, []).append(one)
    for theirs in of_client.values():
        theirs.sort(key=lambda one: one.size)
    left = [(-sum(one.size for one in theirs), client) for client, theirs in of_client.items()]
    heapify(left)
    most = max(1, sum(map(len, of_client.values())) // part)
    chosen: list[Held[_T]] = []
    while left and len(chosen) < most and excess > 0:
        size, client = left[0]
        one = of_client[client].pop()
        chosen.append(one)
        excess -= one.size
        if of_client[client]:
            heapreplace(left, (size + one.size, client))
        else:
            heappop(left)
    return chosen
