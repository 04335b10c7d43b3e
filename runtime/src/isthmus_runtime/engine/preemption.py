"""Who gives way when blocks run out: the newest, which computes its tokens again later. Pure."""

from __future__ import annotations

from enum import Enum

from .blocks import SequenceBlocks
from .handoffs import Handoffs
from .in_flight import StepsInFlight
from .queues import Queues
from .sequence import Phase, Sequence


class Room(Enum):
    """Whether a request may grow now."""

    FOUND = 0
    LATER = 1
    """A step in flight gives the blocks back; or transfers do, and nobody else is there who could."""
    LEFT = 2
    """It was the newest itself, and gave its blocks up."""
    NEVER = 3
    """Nobody else holds a block, and the admission check said that it fits: quarantine ate it."""


class Preemption:
    """Finds blocks for older requests among those of newer ones."""

    def __init__(self, queues: Queues, blocks: SequenceBlocks, handoffs: Handoffs, in_flight: StepsInFlight) -> None:
        self._queues = queues
        self._blocks = blocks
        self._handoffs = handoffs
        self._in_flight = in_flight
        self._pool = blocks.pool
        self.count = 0
        """Requests preempted so far."""

    def make_room(self, seq: Sequence, upto: int) -> Room:
        """Find blocks for `seq` to reach position `upto`, from newer requests if need be."""
        need = self._blocks.missing(seq, upto)
        queues = self._queues
        while self._pool.num_free < need:
            if self._pool.num_free + self._in_flight.fenced_blocks >= need:
                return Room.LATER
            victim = max((queue[-1] for queue in (queues.running, queues.ready) if queue), key=lambda s: s.rank)
            if victim is seq and len(queues.running) + len(queues.ready) == 1:
                return Room.LATER if self._others_hold() else Room.NEVER
            self.preempt(victim)
            if victim is seq:
                return Room.LEFT
        return Room.FOUND

    def preempt(self, seq: Sequence) -> None:
        """Give everything back; the prompt and what was generated are computed again later."""
        self.count += 1
        self._queues.leave(seq)
        seq.scheduled = seq.written = 0
        self._queues.enter(seq, Phase.WAITING)

    def _others_hold(self) -> bool:
        """Whether blocks will come back within a deadline: transfers in either direction, or fenced ones."""
        return self._in_flight.fenced_blocks > 0 or self._handoffs.holding()
