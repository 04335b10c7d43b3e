"""How near a process is to the limit of its memory, and what is still taken then. Pure: time is an argument.

What requests may take is what was left when the process had started: weights, a KV pool and libraries are no reason to
refuse anybody, however little they leave (docs/adr/0053).
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

TIGHT_FROM, CRITICAL_FROM = 0.80, 0.90
"""Shares of what requests may take. Of a router's usual 1 GiB they are some 160 and 80 MiB before the end: what the
largest body takes on its way, and what those that have begun may still ask for until some have ended."""
HYSTERESIS = 0.05
"""A level is left so far below where it begins: what one refusal saves is not enough to take the next one in."""
USUAL = 16 << 20
"""Bytes that a process takes for itself as it begins to serve: heaps of threads, caches. No reason for anything, or one
that starts a few megabytes below its limit would refuse all that comes."""
_REST = 4 * USUAL
"""Of what is free at the start, so much or a sixteenth is for requests, whatever else is promised."""
STEP_S = 0.5
"""Between two times that requests are ended: for their tasks to end and for their memory to come back."""


class Level(IntEnum):
    """What is still taken."""

    CALM = 0
    TIGHT = 1
    """Nothing large; what is large and here already is planned by itself."""
    CRITICAL = 2
    """Nothing new, and some of what runs has to end."""


class Use(NamedTuple):
    """Use of memory, in bytes."""

    mine: int
    """What this process has, and those that work for it."""
    used: int
    """What all have that share the limit, this process among them."""
    limit: int


class Pressure:
    """Memory pressure of one process."""

    def __init__(self, start: Use, reserved: int = 0) -> None:
        """`start`: when no request was there yet. `reserved`: bytes that this process has promised itself and takes by
        and by (a KV pool is committed as it is written); of what is free all but a rest, or nobody would be watched."""
        self.level = Level.CALM
        self.share = 0.0
        """Of what requests may take, how much they have."""
        self.excess = 0
        """Bytes that they have beyond what makes it tight."""
        free = max(0, start.limit - start.used)
        self._start = start.mine + USUAL + min(reserved, max(0, free - max(_REST, free // 16)))
        self._floor = self._start
        self._room = max(0, free - (self._start - start.mine))
        self._next_end = 0.0

    def look(self, use: Use, *, idle: bool) -> Level:
        """The level from now on. `idle`: no request is there, so that what is used is no request's."""
        # As much as it has while nobody is there: heaps that did not come back, caches, a pool that was filled. What
        # comes back later was no such thing.
        has = use.mine + USUAL
        self._floor = max(self._start, has if idle else min(self._floor, has))
        grown = max(0, use.mine - self._floor)
        # Who shares the limit and takes more of it leaves less for requests, and that is all: with little of our own
        # we give way late, as nothing of what we could refuse would help.
        room = grown + max(0, use.limit - use.used)
        self.share = grown / room if room else 0.0
        self.excess = max(0, grown - int(room * TIGHT_FROM))
        lowered = self._reached(self.share + HYSTERESIS)
        self.level = max(self._reached(self.share), min(self.level, lowered))
        return self.level

    @property
    def room(self) -> int:
        """Bytes that requests may take, as it was at the start."""
        return self._room

    def above_start(self, use: Use) -> int:
        """Bytes that this process has more than at its start."""
        return use.mine - self._start

    def may_end(self, now: float) -> bool:
        """Whether a request has to end now; the next one after a pause."""
        if self.level is not Level.CRITICAL or now < self._next_end:
            return False
        self._next_end = now + STEP_S
        return True

    @staticmethod
    def _reached(share: float) -> Level:
        if share >= CRITICAL_FROM:
            return Level.CRITICAL
        return Level.TIGHT if share >= TIGHT_FROM else Level.CALM
