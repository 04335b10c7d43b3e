"""The step being planned, the steps that run, and the blocks those may still write. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..errors import RequestError
from ..interfaces.steps import AdapterSlot, Chunk, LateMask, Later, LateRowMask, RowBlocks, RowMask, RowStart, StepPlan
from ..kv.pool import BlockPool
from .pace import PromptBudget
from .sequence import Effect, Phase, Sequence

Work = list[tuple[Sequence, int, Chunk]]
"""What a step computes, by request and the run (`Sequence.run`) it was planned in."""
_new = tuple.__new__


@dataclass(slots=True)
class StepDraft:
    """A step being planned."""

    budget: int
    """Tokens that may still be added."""
    now: float = 0.0
    prompts: PromptBudget | None = None
    """What prompts may still take of its time; None: none has asked yet."""
    work: Work = field(default_factory=list)
    starts: list[RowStart] = field(default_factory=list)
    grown: list[RowBlocks] = field(default_factory=list)
    masks: list[RowMask] = field(default_factory=list)
    late_masks: list[LateRowMask] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    stuck: list[Sequence] = field(default_factory=list)
    """Requests that can never grow."""
    failed: list[tuple[Sequence, RequestError]] = field(default_factory=list)
    """Requests whose constraint has failed."""
    _allowed: dict[str, tuple[bytes, ...] | LateMask | None] = field(default_factory=dict)
    """What `may_draw` (the next mask, and those after tokens that are forced) and `may_draw_later` were told, for
    `add`."""

    def may_draw(self, seq: Sequence) -> bool:
        """Whether the mask of the request's next token, if it needs one, is known. False: it cannot go on now."""
        if seq.masks is None or seq.sid in self._allowed:
            return True
        try:
            allowed = seq.masks.allowed(seq.tokens[seq.prompt_len :])
        except RequestError as error:
            self.failed.append((seq, error))
            return False
        if isinstance(allowed, Later):
            return False
        self._allowed[seq.sid] = None if allowed is None else (allowed, *seq.masks.forced().masks)
        return True

    def may_draw_later(self, seq: Sequence) -> bool:
        """Whether the request, whose newest token or its mask is not known yet, may draw by a mask that comes late."""
        failed = any(other is seq for other, _ in self.failed)
        if seq.masks is None or failed or len(seq.tokens) < seq.masks_late_from:
            return False
        self._allowed[seq.sid] = seq.masks.late(seq.known - seq.prompt_len)
        return True

    @property
    def full(self) -> bool:
        """Whether no further prompt may start."""
        return self.budget == 0 or (self.prompts is not None and self.prompts.spent)

    def add(self, seq: Sequence, count: int, drafts: tuple[int, ...] = ()) -> None:
        """Plan the next `count` tokens of the request, which has a row and the blocks for them, and verify `drafts`.

        `may_draw` or `may_draw_later` was asked if the request has masks.
        """
        start = seq.scheduled
        count += len(drafts)
        seq.scheduled = end = start + count
        if seq.pools or end < len(seq.tokens) + seq.unseen + len(drafts):
            self.work.append((seq, seq.run, Chunk(seq.row, start, count, 0)))
        else:
            if seq.masks is not None:
                allowed = self._allowed[seq.sid]
                if isinstance(allowed, tuple):
                    self.masks.append(RowMask(seq.row, allowed[: 1 + len(drafts)]))
                elif allowed is not None:
                    self.late_masks.append(LateRowMask(seq.row, allowed))
            # One per row and step: without the class's own `__new__` it costs half.
            self.work.append((seq, seq.run, _new(Chunk, (seq.row, start, count, 1 + len(drafts), drafts))))
        self.budget -= count

    def without_left(self) -> StepDraft:
        """The same without rows that were preempted after they were planned: they leave no trace in the step."""
        work = [w for w in self.work if w[0].phase is Phase.RUNNING and w[1] == w[0].run]
        rows = {seq.row for seq, _, _ in work}
        return StepDraft(
            self.budget,
            self.now,
            self.prompts,
            work,
            [start for start in self.starts if start.row in rows],
            [blocks for blocks in self.grown if blocks.row in rows],
            [mask for mask in self.masks if mask.row in rows],
            [mask for mask in self.late_masks if mask.row in rows],
            self.effects,
            self.stuck,
            self.failed,
        )


class StepsInFlight:
    """Steps that were submitted and not completed, oldest first.

    Blocks given back while a step that may write them runs are *fenced*: they return to the pool when it has completed
    and the answers of its requests have gone (`lift`).
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.newest = 0
        """Number of the newest step."""
        self.completed = 0
        """Number of the newest step that has completed."""
        self._lifted = 0
        """Number of the newest step that fences nothing any more."""
        self.steps: deque[tuple[int, Work]] = deque()
        self.fenced: deque[tuple[int, list[int]]] = deque()
        """(last step that may write them, block ids)."""
        self.fenced_blocks = 0
        self.stale = False
        """Whether a request ended early that the newest step, which may not have begun, still computes."""

    def submit(self, draft: StepDraft, adapters: tuple[AdapterSlot, ...] = ()) -> StepPlan:
        """Number the step and note what it computes. `adapters`: what it puts into slots before."""
        self.newest = step = self.newest + 1
        self.stale = False
        tokens = 0
        chunks: list[Chunk] = []
        for seq, _, chunk in draft.work:
            _, _, count, draws, _ = chunk
            seq.unseen += draws
            seq.last_step = step
            tokens += count
            chunks.append(chunk)
        self.steps.append((step, draft.work))
        return StepPlan(
            step=step,
            starts=tuple(draft.starts),
            grown=tuple(draft.grown),
            chunks=tuple(chunks),
            num_tokens=tokens,
            adapters=adapters,
            masks=tuple(draft.masks),
            late_masks=tuple(draft.late_masks),
        )

    def complete(self, step: int) -> Work:
        """Take the oldest step, which has completed: what it computed."""
        number, work = self.steps.popleft()
        assert step == number, f"result of step {step}, expected {number}"
        self.completed = step
        return work

    def ended_early(self, seq: Sequence) -> None:
        """The request has ended before its time: it may leave a step that has not begun."""
        self.stale = self.stale or (len(self.steps) > 1 and seq.last_step == self.newest)

    def without_ended(self, plan: StepPlan) -> StepPlan | None:
        """The newest step, which has not begun, without the requests that have ended; None: nothing is left of it.

        What they held stays fenced until the step completes, or where nothing is left, the one before it.
        """
        self.stale = False
        step, work = self.steps.pop()
        assert step == plan.step == self.newest and self.steps, f"step {step} is not the newest of several"
        left = [w for w in work if w[0].phase is Phase.RUNNING and w[1] == w[0].run]
        if not left:
            before = self.steps[-1][0]
            self.fenced = deque((min(last, before), ids) for last, ids in self.fenced)
            return None
        self.steps.append((step, left))
        rows = {seq.row for seq, _, _ in left}
        return StepPlan(
            step=step,
            starts=tuple(start for start in plan.starts if start.row in rows),
            grown=tuple(grown for grown in plan.grown if grown.row in rows),
            chunks=tuple(chunk for _, _, chunk in left),
            num_tokens=sum(chunk.num_tokens for _, _, chunk in left),
            adapters=plan.adapters,
            masks=tuple(mask for mask in plan.masks if mask.row in rows),
            late_masks=tuple(mask for mask in plan.late_masks if mask.row in rows),
        )

    def release(self, seq: Sequence, ids: list[int]) -> None:
        """Return blocks of the request now, or when the last step that may write them is lifted."""
        if not ids:
            return
        if seq.last_step > self._lifted:
            self.fenced.append((seq.last_step, ids))
            self.fenced_blocks += len(ids)
        else:
            self._pool.release(ids)

    def lift(self) -> None:
        """Return what the steps fenced that have completed."""
        self._lifted = self.completed
        for _ in range(len(self.fenced)):
            last, ids = self.fenced.popleft()
            if last <= self._lifted:
                self.fenced_blocks -= len(ids)
                self._pool.release(ids)
            else:
                self.fenced.append((last, ids))
