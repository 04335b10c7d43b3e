"""Makes values larger until they are refused, then looks for the edge, and keeps what was dearest."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from measuring import Cost
from places import Place
from values import FIXED, families, written

from isthmus_runtime.openai.planning import planning_takes

MOST_BYTES = 15 << 20
"""Of a body: the server takes 16 MiB."""
FACTOR, _FASTER, _SMALL = 4, 16, 4096
"""By how much a size grows; and while it is small."""
_BISECTIONS = 1
_ENOUGH_S = 8.0
"""Of a processor: what is larger is dearer, and known to be dear."""

LOOP_GAP_S, CPU_S, OTHERS_S = 0.25, 2.0, 1.0
"""Bars: of a ping, of a request's processor time, of the wait of another client."""
PEAK_MIB, STAYS_MIB = 48.0, 48.0
"""Beyond what is set aside for a body on its way (docs/adr/0053), and what is left of it."""


@dataclass
class Row:
    """What a value of one size costs."""

    id: str
    size: int
    cost: Cost

    @property
    def flags(self) -> str:
        """The bars that it is over."""
        c = self.cost
        over = (
            ("gap", c.gap_s > LOOP_GAP_S),
            ("cpu", c.cpu_s > CPU_S),
            ("others", c.others_s > OTHERS_S),
            ("refused", c.refused > 0),
            ("peak", c.peak_mib > PEAK_MIB + planning_takes(c.body) / (1 << 20)),
            ("stays", c.stays_mib > STAYS_MIB),
            ("silent", c.status == 0),
            ("500", c.status == 500),
        )
        return ",".join(name for name, is_over in over if is_over)

    def json(self) -> dict[str, Any]:
        """For a file."""
        return {"id": self.id, "size": self.size, "flags": self.flags, **asdict(self.cost)}


def body_of(place: Place, family: str, size: int, seed: int) -> bytes:
    """The body; b"" where there is none so large."""
    r = random.Random(f"{seed} {place.name} {family}")
    try:
        return written(place.body(families(place)[family](size, r)))
    except (ValueError, RecursionError, MemoryError, OverflowError):
        return b""


def search(place: Place, family: str, send: Callable[[bytes], Cost], seed: int) -> Iterator[Row]:
    """All that were sent."""
    name = f"{place.name}/{family}"
    size, taken, refused = 1, 0, 0
    last = b""
    while size < 1 << 25:
        raw = body_of(place, family, size, seed)
        if not raw or len(raw) > MOST_BYTES or raw == last:
            break
        last = raw
        row = Row(name, size, send(raw))
        yield row
        if row.cost.cpu_s > _ENOUGH_S or row.cost.status == 0 or place.kind in FIXED:
            return
        if row.cost.status == 200:
            taken = size
        elif taken:
            refused = size
            break
        size *= _FASTER if size < _SMALL else FACTOR
    low, high = taken, refused or size
    for _ in range(_BISECTIONS if taken else 0):
        size = int((low * high) ** 0.5)
        raw = body_of(place, family, size, seed)
        if not low < size < high or not raw or len(raw) > MOST_BYTES:
            break
        row = Row(name, size, send(raw))
        yield row
        if row.cost.status == 200:
            low = size
        else:
            high = size
    # What is far beyond the edge is to be refused at once.
    if refused and (largest := _largest(place, family, seed, refused)):
        size, raw = largest
        yield Row(name, size, send(raw))


def _largest(place: Place, family: str, seed: int, size: int) -> tuple[int, bytes] | None:
    raw = body_of(place, family, size, seed)
    if not raw:
        return None
    most = int(size * MOST_BYTES / len(raw) * 0.9)
    for factor in (1, 4, 16, 64):
        if most // factor <= 2 * size:
            return None
        began = time.monotonic()
        found = body_of(place, family, most // factor, seed)
        if found and len(found) <= MOST_BYTES:
            return most // factor, found
        if time.monotonic() - began > 3:
            print(f"slow to make: {place.name}/{family}", file=sys.stderr)
            return None
    return None
