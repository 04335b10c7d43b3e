"""Who gives way where grammars take more memory than there is. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

Held = tuple[str, int]
"""What one client's requests hold of one grammar: the client's name, the grammar's key."""


def giving_way(
    grammars: Mapping[int, int], walks: Mapping[Held, int], need: int, whose: str = "", new: int = 0
) -> list[Held] | None:
    """What to release for `need` bytes: of the client that has most, what is largest, until it is enough.

    `grammars`: bytes of each, by key. `walks`: what is held, with the bytes of the walks alone. The clients that share
    a grammar have equal parts of it, and it is free when the last of them releases it: so one that many share is the
    last for each of them, and one client's excess ends nobody else's requests. None: the client `whose` has most, with
    the `new` bytes that it asks for, and holds nothing that is larger than these; or nothing is left to release.
    """
    left, sharing, gone = dict(walks), Counter(key for _, key in walks), list[Held]()
    while need > 0:
        parts = {held: walk + grammars[held[1]] / sharing[held[1]] for held, walk in left.items()}
        of = Counter[str]()
        of[whose] = new
        for (client, _), part in parts.items():
            of[client] += int(part)
        most = max(of, key=lambda client: of[client])
        largest = max((held for held in left if held[0] == most), key=lambda held: parts[held], default=None)
        if largest is None or (most == whose and parts[largest] <= new):
            return None
        gone.append(largest)
        need -= left.pop(largest)
        sharing[largest[1]] -= 1
        if not sharing[largest[1]]:
            need -= grammars[largest[1]]
    return gone
