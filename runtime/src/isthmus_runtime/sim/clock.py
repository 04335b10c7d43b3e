"""Virtual time: a heap of callbacks, one seeded source of chance, and the trace of what happened."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from random import Random

TRACE_KEPT = 400


class Violation(AssertionError):
    """An invariant does not hold."""


class Clock:
    """Runs callbacks in order of (time, order of scheduling). Equal seeds give equal histories."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = Random(seed)
        self.trace: deque[tuple[float, str, tuple[object, ...]]] = deque(maxlen=TRACE_KEPT)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def time(self) -> float:
        """The time, for components that take a clock."""
        return self.now

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run `action` in `delay_s` seconds of virtual time."""
        self.at(self.now + delay_s, action)

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Run `action` at a time; equal times keep the order of these calls."""
        heapq.heappush(self._heap, (max(self.now, when), next(self._order), action))

    def next_time(self) -> float | None:
        """When the next callback is due."""
        return self._heap[0][0] if self._heap else None

    def pop(self) -> None:
        """Run the next callback."""
        due, _, action = heapq.heappop(self._heap)
        assert due >= self.now
        self.now = due
        action()

    def note(self, who: str, *what: object) -> None:
        """Add a line to the trace; formatted only when it is printed."""
        self.trace.append((self.now, who, what))

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return probability > 0 and self.random.random() < probability

    def lines(self, last: int) -> list[str]:
        """The newest lines of the trace."""
        return [f"{at:10.4f} {who:<8} {' '.join(map(str, what))}" for at, who, what in list(self.trace)[-last:]]
