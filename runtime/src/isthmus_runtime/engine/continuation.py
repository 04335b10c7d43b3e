"""What running requests compute in the next step: their next token, a chunk of their prompt, or guesses. Pure."""

from __future__ import annotations

from ..interfaces.steps import Chunk
from .admission import Admission
from .blocks import SequenceBlocks
from .drafts import HOLD_SHARE, Speculation
from .in_flight import StepDraft, StepsInFlight
from .preemption import Preemption, Room
from .queues import Queues
from .sequence import Phase, Sequence

_new = tuple.__new__


class Continuation:
    """Goes before admission: who runs goes on."""

    def __init__(
        self,
        queues: Queues,
        blocks: SequenceBlocks,
        steps: StepsInFlight,
        admission: Admission,
        preemption: Preemption,
        speculation: Speculation,
        late_masks: bool,
    ) -> None:
        """`late_masks`: as of `Scheduler`."""
        self._queues = queues
        self._blocks = blocks
        self._steps = steps
        self._admission = admission
        self._preemption = preemption
        self._speculation = speculation
        self._late_masks = late_masks
        self.may_hold = speculation.most > 0
        """Whether there may have been a request that waits for its newest token."""

    @property
    def holds(self) -> bool:
        """Whether so many running requests wait for their newest tokens that none should be planned before those."""
        running = self._queues.running
        return self.may_hold and HOLD_SHARE * sum(seq.holds for seq in running) >= max(1, len(running))

    def plan(self, draft: StepDraft) -> None:
        """Plan what running requests can compute, oldest first; here, if it is one token and needs no block."""
        running, work = Phase.RUNNING, draft.work
        self._speculation.begin(len(self._queues.running))
        for seq in tuple(self._queues.running):
            start = seq.scheduled
            known = len(seq.tokens) + seq.unseen
            if known >= seq.end_len or seq.phase is not running:
                continue
            special = seq.masks is not None or seq.holds or seq.promised or seq.pools
            if start + 1 == known <= seq.room and draft.budget and not special:
                # What `StepDraft.add` does, without the call: most rows of most steps.
                seq.scheduled = known
                work.append((seq, seq.run, _new(Chunk, (seq.row, start, 1, 1, ()))))
                draft.budget -= 1
            else:
                self._plan_one(seq, known - start, draft)

    def _plan_one(self, seq: Sequence, count: int, draft: StepDraft) -> None:
        """Plan what a running request can compute of its next `count` tokens."""
        guesses = seq.holds and count == 1
        if guesses and seq.unseen:
            return
        if seq.masks is not None and not self._may_draw(seq, draft):
            return
        if guesses:
            self._plan_guessing(seq, draft)
            return
        count = self._admission.chunk(seq.scheduled, count, draft)
        if count <= 0:
            return
        upto = seq.scheduled + count
        if (upto <= seq.room and not seq.promised) or self._give_room(seq, upto, draft):
            draft.add(seq, count)

    def _plan_guessing(self, seq: Sequence, draft: StepDraft) -> None:
        """Plan the next token of a running request, and guesses of those after it that take nothing from others."""
        covered = seq.known <= seq.room and not seq.promised
        if not draft.budget or not (covered or self._give_room(seq, seq.known, draft)):
            return
        drafts = self._speculation.guess(seq, min(draft.budget - 1, seq.end_len - seq.known - 1))
        upto = seq.known + len(drafts)
        if upto > seq.room and self._blocks.missing(seq, upto) + len(self._queues.running) <= self._admission.free():
            self._admission.grow(seq, upto, draft)
        drafts = drafts[: seq.room - seq.known]
        seq.holds = bool(drafts) or seq.masks is not None
        draft.add(seq, 1, drafts)

    def _may_draw(self, seq: Sequence, draft: StepDraft) -> bool:
        """Whether a running request with masks may be in the step: its mask is known, or comes before the draw."""
        if not seq.unseen:
            if draft.may_draw(seq):
                return True
            if seq.holds:
                if self.holds:
                    self._speculation.too_late(seq)
                return False
        return self._late_masks and draft.may_draw_later(seq)

    def _give_room(self, seq: Sequence, upto: int, draft: StepDraft) -> bool:
        """Blocks for a running request up to position `upto`; False when it cannot go on now."""
        self._steps.release(seq, self._blocks.trim(seq))
        room = self._preemption.make_room(seq, upto)
        if room is Room.NEVER:
            draft.stuck.append(seq)
        if room is Room.FOUND:
            self._admission.grow(seq, upto, draft)
        return room is Room.FOUND
