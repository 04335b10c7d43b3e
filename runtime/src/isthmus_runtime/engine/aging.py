"""Nobody waits without end for more urgent requests that keep coming: some turns go by age. Pure.

Priorities that rise with the time spent waiting would need a rate that fits every load: under a flood of what is not
urgent, everything soon counts as old and an urgent request waits like all others. A share of the starts holds under any
load (docs/adr/0033).
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import nsmallest
from itertools import chain
from operator import attrgetter

from .queues import Queues
from .sequence import Sequence

EVERY = 8
"""One of so many starts goes to who has waited longest."""
_ARRIVAL = attrgetter("arrival_s", "sid")


class Aging:
    """Counts the starts out of all who wait for the same. A request with m earlier ones among them is at their head
    after at most EVERY * (m + 1) starts and those of one step."""

    def __init__(
        self, queues: Queues, *waiting: list[Sequence], concerns: Callable[[Sequence], bool] = lambda seq: True
    ) -> None:
        """`waiting`: queues, which are in order. `concerns`: who of them waits for this."""
        self._queues = queues
        self._waiting = waiting
        self._concerns = concerns
        self._starts = 0

    def started(self) -> None:
        """One of them is computed now, or received."""
        self._starts += 1

    def turn(self) -> None:
        """Put who has waited longest first where it is due. Who is put first stays that: until it starts, after a
        preemption, and against those that come later."""
        if self._starts < EVERY:
            return
        if len({queue[end].rank[0] for queue in self._waiting if queue for end in (0, -1)}) < 2:
            self._starts = EVERY  # who is more urgent than others may come just after: one turn stays due
            return
        due, self._starts = divmod(self._starts, EVERY)
        for seq in nsmallest(due, filter(self._concerns, chain(*self._waiting)), key=_ARRIVAL):
            self._queues.put_first(seq)
