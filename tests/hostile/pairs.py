"""Two places of one body at once: what is dear by one field, with each other field that may make it dearer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from measuring import Cost
from places import Place, places
from search import MOST_BYTES, Row
from values import families, largest, written

_SMALLER = 4
_TRIES = 6


@dataclass(frozen=True)
class Dear:
    """A value that a search found."""

    place: Place
    family: str
    size: int

    @property
    def name(self) -> str:
        """As of its row."""
        return f"{self.place.name}/{self.family}"


def dearest(rows: Sequence[Mapping[str, Any]], of: Mapping[str, tuple[Place, str]], count: int) -> list[Dear]:
    """Of the rows of searches that were answered: the `count` dearest by each measure, each id once."""
    answered = [row for row in rows if row["status"] == 200 and row["id"] in of]
    found: dict[str, Dear] = {}
    for measure in ("cpu_s", "gap_s", "peak_mib", "answer", "body"):
        best: dict[str, Mapping[str, Any]] = {}
        for row in answered:
            if row["id"] not in best or row[measure] > best[row["id"]][measure]:
                best[row["id"]] = row
        for row in sorted(best.values(), key=lambda one: -one[measure])[:count]:
            place, family = of[row["id"]]
            found.setdefault(row["id"], Dear(place, family, row["size"]))
    return list(found.values())


def pairs(dear: Sequence[Dear]) -> Iterator[tuple[str, Callable[[int], bytes], int, Dear]]:
    """Id, what makes the body of a size, the largest size, and the dear one: with each small field of its endpoint, and
    with each other dear one there."""
    for one in dear:
        for other in places(one.place.endpoint):
            if other.path == one.place.path or other.path[0] == one.place.path[0] != "messages":
                continue
            for value in largest(other):
                yield f"{one.name} + {other.name}={value}", _maker(one, other, lambda n, r, v=value: v), one.size, one
        for second in dear:
            if second.place.endpoint == one.place.endpoint and second.name > one.name and not _within(one, second):
                yield f"{one.name} + {second.name}", _maker(one, second.place, _scaled(one, second)), one.size, one


def _scaled(one: Dear, second: Dear) -> Callable[[int, random.Random], Any]:
    """The second's values, as much smaller as the first's."""
    make, ratio = families(second.place)[second.family], second.size / one.size
    return lambda n, r: make(max(1, int(n * ratio)), r)


def _within(one: Dear, second: Dear) -> bool:
    short, long = sorted((one.place.path, second.place.path), key=len)
    return long[: len(short)] == short


def _maker(one: Dear, other: Place, value: Callable[[int, random.Random], Any]) -> Callable[[int], bytes]:
    def make(size: int) -> bytes:
        r = random.Random(f"{one.name} {size}")
        try:
            body = one.place.body(families(one.place)[one.family](size, r))
            return written(other.put(body, value(size, r)))
        except (ValueError, RecursionError, OverflowError, TypeError, KeyError):
            return b""

    return make


def tried(name: str, make: Callable[[int], bytes], size: int, send: Callable[[bytes], Cost]) -> Iterator[Row]:
    """All that were sent: smaller until it is taken."""
    for _ in range(_TRIES):
        raw = make(size)
        if not raw:
            return
        if len(raw) <= MOST_BYTES:
            row = Row(name, size, send(raw))
            yield row
            if row.cost.status != 400 or "unknown parameter" in row.cost.said:
                return
        if size == 1:
            return
        size = max(1, size // _SMALLER)
