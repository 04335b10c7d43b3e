"""Where each live request stands, and what it holds there: its place in a queue, a row, a promise, its blocks. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from operator import attrgetter

from .adapters import AdapterSlots
from .blocks import SequenceBlocks
from .handoffs import Handoffs
from .in_flight import StepsInFlight
from .sequence import FIRST, Phase, Sequence

_RANK = attrgetter("rank")


class Queues:
    """Three queues in scheduling order, `rows` rows, and what admission has promised. Owns no block itself."""

    def __init__(
        self,
        rows: int,
        blocks: SequenceBlocks,
        handoffs: Handoffs,
        in_flight: StepsInFlight,
        adapters: AdapterSlots,
    ) -> None:
        self._blocks = blocks
        self._handoffs = handoffs
        self._in_flight = in_flight
        self.adapters = adapters
        self.live: dict[str, Sequence] = {}
        """Every live request by its scheduler id; those in no queue are in a transfer."""
        self.waiting: list[Sequence] = []
        self.ready: list[Sequence] = []
        self.running: list[Sequence] = []
        self.rows = list(range(rows - 1, -1, -1))
        """Free ones."""
        self.receivers = 0
        """Requests in `waiting` that need no row, because a peer computes their prompt."""
        self.receiving = self.sending = self.fetching = 0
        """Requests in a transfer."""
        self.promised = 0
        """Blocks that admitted requests may still take for their prompts."""
        self._by_phase = {Phase.WAITING: self.waiting, Phase.READY: self.ready, Phase.RUNNING: self.running}

    def enter(self, seq: Sequence, phase: Phase) -> None:
        """Put the request, which stands in no queue, where its new phase belongs."""
        seq.phase = phase
        self._in_transfer(phase, 1)
        queue = self._by_phase.get(phase)
        if queue is not None:
            queue.insert(bisect_left(queue, seq.rank, key=_RANK), seq)
            self.receivers += phase is Phase.WAITING and seq.receives

    def withdraw(self, seq: Sequence) -> None:
        """Take the request out of its queue; what it holds stays."""
        self._in_transfer(seq.phase, -1)
        queue = self._by_phase.get(seq.phase)
        if queue is not None:
            at = bisect_left(queue, seq.rank, key=_RANK)
            assert queue[at] is seq, f"{seq.sid} is not where its rank says"
            del queue[at]
            self.receivers -= seq.phase is Phase.WAITING and seq.receives

    def put_first(self, seq: Sequence) -> None:
        """From now on it goes before all of any priority, behind those that were put first and came earlier."""
        self.withdraw(seq)
        seq.rank = (FIRST, seq.arrival_s, seq.sid)
        self.enter(seq, seq.phase)

    def leave(self, seq: Sequence) -> None:
        """Take the request out of its queue, row, promise and blocks."""
        self.withdraw(seq)
        if seq.row >= 0:
            self.rows.append(seq.row)
            seq.row = -1
            if seq.adapter:
                self.adapters.stopped(seq.adapter)
        self.promise(seq, 0)
        written = {Phase.RECEIVING: seq.attempt, Phase.FETCHING: seq.fetch}.get(seq.phase)
        mine = self._blocks.take_all(seq) if written is None else self._handoffs.detach(seq, written)
        self._in_flight.release(seq, mine)
        seq.run += 1

    def promise(self, seq: Sequence, count: int) -> None:
        """Keep `count` free blocks for the request, in place of what was kept for it."""
        self.promised += count - seq.promised
        seq.promised = count

    def check(self, rows: int) -> None:
        """Assert that the counts agree with the requests. Raises AssertionError."""
        assert self.promised == sum(seq.promised for seq in self.live.values()), "promises do not add up"
        held = sorted(self.rows + [seq.row for seq in self.running])
        assert held == list(range(rows)), f"rows lost or shared: {held}"
        phases = [seq.phase for seq in self.live.values()]
        for phase, count in (
            (Phase.WAITING, len(self.waiting)),
            (Phase.READY, len(self.ready)),
            (Phase.RUNNING, len(self.running)),
            (Phase.RECEIVING, self.receiving),
            (Phase.SENDING, self.sending),
            (Phase.FETCHING, self.fetching),
        ):
            assert phases.count(phase) == count, f"{phases.count(phase)} requests are {phase}, counted {count}"
        self.adapters.check(
            Counter(seq.adapter for seq in self.running if seq.adapter),
            Counter(seq.adapter for seq in self.live.values() if seq.adapter),
        )
        assert self.receivers == sum(seq.receives for seq in self.waiting), "waiting receivers do not add up"

    def _in_transfer(self, phase: Phase, change: int) -> None:
        if phase is Phase.RECEIVING:
            self.receiving += change
        elif phase is Phase.SENDING:
            self.sending += change
        elif phase is Phase.FETCHING:
            self.fetching += change
