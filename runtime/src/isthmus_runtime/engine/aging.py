"""Nobody waits without end for more urgent requests that keep coming: some turns go by age. Pure.

Priorities that rise with the time spent waiting would need a rate that fits every load: under a flood of what is not
urgent, everything soon counts as old and an urgent request waits like all others. A share of the starts holds under any
load (docs/adr/0033).
"""

from __future__ import annotations

from heapq import nsmallest
from operator import attrgetter

from .queues import Queues
from .sequence import Sequence

EVERY = 8
"""One of so many starts goes to who has waited longest."""
_ARRIVAL = attrgetter("arrival_s", "sid")


class Aging:
    """Counts the starts out of one queue. A request with m earlier ones in the queue is at its head after at most
    EVERY * (m + 1) starts and those of one step."""

    def __init__(self, queues: Queues, queue: list[Sequence]) -> None:
        self._queues = queues
        self._queue = queue
        self._starts = 0

    def started(self) -> None:
        """One request has left the queue to be computed, or to be received."""
        self._starts += 1

    def turn(self) -> None:
        """Put who has waited longest first where it is due. Who is put first stays that: until it starts, after a
        preemption, and against those that come later."""
        due, self._starts = divmod(self._starts, EVERY)
        if due and self._queue and self._queue[0].rank[0] != self._queue[-1].rank[0]:
            for seq in nsmallest(due, self._queue, key=_ARRIVAL):
                self._queues.put_first(seq)
