"""Who may start: in order of rank, and only when the whole prompt fits beside what others were promised. Pure."""

from __future__ import annotations

from ..interfaces.steps import RowStart
from ..kv.groups import ceil_div
from .aging import Aging
from .blocks import Hits, SequenceBlocks
from .fetches import Fetches
from .handoffs import Handoffs
from .in_flight import StepDraft
from .pace import Pace
from .preemption import Preemption, Room
from .queues import Queues
from .sequence import Kind, Phase, Sequence

AHEAD = 512
"""Tokens: some seconds of a stream, in which prompts arrive also from a busy prefill."""
AHEAD_SHARE = 8
"""In a small pool: at most an eighth of it."""


class Admission:
    """Gives rows to arrived and waiting requests, and reserves blocks for prompts that a peer computes."""

    def __init__(
        self,
        queues: Queues,
        blocks: SequenceBlocks,
        handoffs: Handoffs,
        preemption: Preemption,
        pace: Pace,
        fetches: Fetches,
    ) -> None:
        self._queues = queues
        self._blocks = blocks
        self._handoffs = handoffs
        self._preemption = preemption
        self._pace = pace
        self._fetches = fetches
        self._pool = blocks.pool
        self._row_turns = Aging(queues, queues.ready, queues.waiting, concerns=lambda seq: not seq.receives)
        self._waiting_turns = Aging(queues, queues.waiting)
        self.prefix_queries = 0
        self.prefix_hits = 0

    def admit(self, draft: StepDraft) -> None:
        """Start whoever may start within the draft's budget."""
        self._row_turns.turn()
        if self._queues.ready and not self._admit_ready(draft):
            return
        if self._queues.waiting:
            self._admit_waiting(draft)

    def _admit_ready(self, draft: StepDraft) -> bool:
        """Requests whose KV has arrived. False: one of them must wait, and with it all that came later.

        They go first, as they hold blocks. But the last free row is that of the first of all who need one: else those
        that are computed here would wait for as long as more arrive than there are rows.
        """
        queues = self._queues
        for seq in list(queues.ready):
            if seq.phase is not Phase.READY:
                continue  # preempted while an older arrival made room
            if not draft.may_draw(seq):
                continue
            if seq.adapter:
                self._claim_before(seq)
            if not self._has_adapter(seq):
                continue
            if draft.budget == 0 or not queues.rows:
                return False
            if self.free() < self._blocks.missing(seq, seq.known):
                # With nothing running nobody else will give blocks back: the newest arrival must.
                room = Room.LATER if queues.running else self._preemption.make_room(seq, seq.known)
                if room is Room.NEVER:
                    draft.stuck.append(seq)
                if room is not Room.FOUND:
                    return False
            if len(queues.rows) == 1 and self._another_first(seq, draft):
                return False
            queues.withdraw(seq)
            self._row_turns.started()
            self._start(seq, min(seq.known - seq.scheduled, draft.budget), draft)
        return True

    def _claim_before(self, seq: Sequence) -> None:
        """Have the first waiting request that is computed here with an adapter ask for a slot before `seq`, if it ranks
        before: what arrives would take each slot that comes free. Only where it has the blocks that it needs: those
        that arrived hold some, and must be able to start and end."""
        for other in self._queues.waiting:
            if other.rank > seq.rank:
                return
            if other.adapter and not other.receives and not other.unseen:
                if self.free() >= self._blocks.peak(len(other.tokens) + 1):
                    self._has_adapter(other)
                return

    def _another_first(self, seq: Sequence, draft: StepDraft) -> bool:
        """Start a waiting request that is computed here, where one ranks before `seq` and can start."""
        for other in self._queues.waiting:
            if other.rank > seq.rank:
                return False
            if self._may_compute(other, draft):
                # The first alone: those behind it take no blocks that it may need.
                self._admit_local(other, draft)
                return not self._queues.rows
        return False

    def _may_compute(self, seq: Sequence, draft: StepDraft) -> bool:
        """Whether the request is computed here, and nothing but a row, blocks and room in the draft keeps it waiting.
        Preempted while a sample was in flight, its tokens are not all known yet."""
        return not seq.receives and not seq.unseen and draft.may_draw(seq) and self._has_adapter(seq)

    def _admit_waiting(self, draft: StepDraft) -> None:
        queues = self._queues
        self._waiting_turns.turn()
        kept = 0
        for seq in list(queues.waiting):
            if not seq.receives and (draft.full or not queues.rows):
                if not queues.receivers:
                    return
                # The first that waits for a row alone: what comes later leaves the blocks that it will need then.
                kept = kept or self._blocks.peak(len(seq.tokens) + 1)
                continue
            if not seq.receives and not self._may_compute(seq, draft):
                if seq.adapter and not seq.unseen:
                    # The same for a slot, which it claims when it has the blocks.
                    kept = kept or self._blocks.peak(len(seq.tokens) + 1)
                continue
            if not (self._admit_receiver(seq, draft, kept) if seq.receives else self._admit_local(seq, draft)):
                return

    def _admit_local(self, seq: Sequence, draft: StepDraft) -> bool:
        """Start a request whose prompt is computed here, or a fetch for it. False: it must wait."""
        self._blocks.hash_prompt(seq, moves=seq.kind is Kind.SEND)
        # A hit leaves one token to compute, and where prompt tokens are to be scored, whose scores are not known.
        most = len(seq.tokens) - 1
        most = most if seq.scores is None else min(most, len(seq.scores))
        hits = self._blocks.find_hits(seq, most)
        if self._fetches_first(seq, hits, most, draft):
            return True
        fresh = max(0, self._blocks.peak(len(seq.tokens) + 1) - hits.held)
        if self.free() < fresh + hits.evictable:
            return False
        count = self.chunk(hits.tokens, len(seq.tokens) - hits.tokens, draft)
        if count == 0:
            return True  # the draft is full; requests that a peer computes may still be reserved for
        self._queues.withdraw(seq)
        self._waiting_turns.started()
        self._row_turns.started()
        self._take_hits(seq, hits)
        self._queues.promise(seq, fresh)
        self._start(seq, count, draft)
        return True

    def _fetches_first(self, seq: Sequence, hits: Hits, most: int, draft: StepDraft) -> bool:
        """Whether the request waits for the storage pool, which may have more of its prompt than `hits`. As a receiver,
        it takes no blocks that others need to go on."""
        first = self._fetches.first_missing(seq, hits, most, draft.now)
        if first is None:
            return False
        if self._fetches.under_way(first):
            return True
        need = most // self._blocks.block_size - len(hits.blocks[0])
        room = self._leaves_room(hits.held + need)
        if self._fetches.full or not room or self.free() < need + hits.evictable + len(self._queues.running):
            return False  # it is computed, if it can start
        draft.effects.append(self._fetches.begin(seq, hits, most, draft.now))
        return True

    def chunk(self, start: int, wanted: int, draft: StepDraft) -> int:
        """How many of the next `wanted` tokens of a request the draft takes: as many as tokens and time allow."""
        count = min(wanted, draft.budget)
        if count <= 1:
            return count
        if draft.prompts is None:
            draft.prompts = self._pace.prompts(self._queues.running)
        return draft.prompts.take(start, count)

    def _admit_receiver(self, seq: Sequence, draft: StepDraft, kept: int) -> bool:
        """Reserve the blocks that a peer will write, beside `kept` ones for who comes first. False: it must wait.

        They cannot be preempted before they have arrived: running requests must be able to go on beside them.
        """
        self._blocks.hash_prompt(seq, moves=True)
        hits = self._blocks.find_hits_of_receiver(seq)
        fresh = self._blocks.missing_to_receive(seq, hits)
        if not self._leaves_room(hits.held + fresh):
            return False
        growth = len(self._queues.running) * len(self._blocks.groups)
        if self.free() < fresh + hits.evictable + growth + kept:
            return False
        self._queues.withdraw(seq)
        self._waiting_turns.started()
        self._take_hits(seq, hits)
        draft.effects.append(self._handoffs.reserve(seq))
        self._queues.enter(seq, Phase.RECEIVING)
        return True

    def _has_adapter(self, seq: Sequence) -> bool:
        """Whether the request's adapter, if it has one, is in a slot or finds one."""
        return not seq.adapter or self._queues.adapters.may_start(seq.adapter)

    def _take_hits(self, seq: Sequence, hits: Hits) -> None:
        if not seq.started:
            self.prefix_queries += len(seq.tokens)
            self.prefix_hits += hits.tokens
            seq.cached_tokens = hits.tokens
        self._blocks.take_hits(seq, hits)
        seq.scheduled = seq.written = hits.tokens

    def _leaves_room(self, need: int) -> bool:
        """Whether the largest running request could go on for AHEAD tokens beside `need` more blocks for a transfer.

        Not to its end: most answers end long before what they may come to, which without `max_tokens` is the pool. One
        that has used up what is ahead waits for transfers, which have deadlines.
        """
        size, groups = self._blocks.block_size, len(self._blocks.groups)
        ahead = min(ceil_div(AHEAD, size) * groups, self._pool.usable // AHEAD_SHARE)
        running = self._queues.running
        largest = max((min(seq.peak, ceil_div(seq.room, size) * groups + ahead) for seq in running), default=0)
        lost = self._pool.counts().quarantined + self._handoffs.receiving_blocks()
        return need + lost + largest <= self._pool.usable

    def _start(self, seq: Sequence, count: int, draft: StepDraft) -> None:
        """Give the request a row and its first chunk, of `count` tokens."""
        seq.row = self._queues.rows.pop()
        seq.started = True
        seq.run += 1
        self._queues.enter(seq, Phase.RUNNING)
        self.grow(seq, seq.scheduled + count)
        table = tuple(tuple(ids) for ids in seq.blocks)
        sampling = seq.request.sampling
        scores = -1 if seq.scores is None else sampling.prompt_logprobs
        adapter = self._queues.adapters.start(seq.adapter) if seq.adapter else 0
        draft.starts.append(
            RowStart(
                seq.row,
                seq.sid,
                tuple(seq.tokens),
                seq.prompt_len,
                table,
                sampling,
                adapter=adapter,
                prompt_logprobs=scores,
                pooling=seq.request.pooling,
            )
        )
        seq.own()
        draft.add(seq, count)

    def grow(self, seq: Sequence, upto: int, draft: StepDraft | None = None) -> None:
        """Give the request blocks for positions [0, upto), which are free, and tell the draft's executor of them."""
        grown = self._blocks.grow(seq, upto)
        if draft is not None:
            draft.grown += grown
        if seq.promised:
            # Once the prompt is covered the promise has been kept.
            taken = sum(len(g.block_ids) for g in grown)
            self._queues.promise(seq, 0 if upto >= seq.known else max(0, seq.promised - taken))

    def free(self) -> int:
        """Free blocks that are not promised to any request."""
        return self._pool.num_free - self._queues.promised
