"""Continuous batching as a pure state machine: requests and results in, step plans and effects out.

One token budget serves prefill chunks and decode tokens alike. No clock, no I/O, no randomness: time is an argument.

Why nothing hangs:
1. a request whose peak can never fit the pool is refused by `add`;
2. a request is admitted only when its whole prompt fits beside what admitted ones still need (their reservations);
3. the oldest running request may take blocks from newer ones (recompute preemption);
4. blocks held for transfers are bounded by the transfers' deadlines, and those requests hold no row;
5. every phase has a deadline, fired by `tick`.

Step N+1 may be planned while step N runs. Blocks that a running step may still write are *fenced*: they return to
the pool when that step completes.
"""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Iterable

from ..config import SchedulerConfig
from ..errors import Cancelled, DeadlineExceeded, EngineFailed, InvalidRequest, NeverFits, Overloaded, RequestError
from ..interfaces.steps import Chunk, Constraint, RowBlocks, RowMask, RowStart, StepOutput, StepPlan
from ..kv.plan import KvPlan
from ..kv.pool import BlockPool
from ..protocol import PrefillRecord
from ..request import FinishReason, GenerateRequest, TokenChunk, TokenLogprobs
from .blocks import SequenceBlocks
from .handoffs import Handoffs
from .sequence import CancelAttempt, Effect, Emit, Kind, Phase, SchedulerStats, Sequence


class Scheduler:
    """Decides what runs in the next step and what every result means. Drive it from one thread."""

    def __init__(
        self,
        config: SchedulerConfig,
        plan: KvPlan,
        pool: BlockPool,
        *,
        layout_digest: str = "",
        kv_heads: int = 1,
        recompute: bool = True,
    ) -> None:
        self.config = config
        self.max_model_len = plan.max_model_len
        self.pool = pool
        self.blocks = SequenceBlocks(plan, pool, prefix_caching=pool.prefix_caching)
        self.handoffs = Handoffs(self.blocks, layout_digest, kv_heads)
        self._recompute = recompute
        self._live: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._ready: list[Sequence] = []
        self._running: list[Sequence] = []
        self._rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._step = 0
        self._in_flight: deque[tuple[int, list[tuple[Sequence, int, Chunk]]]] = deque()
        self._fenced: deque[tuple[int, list[int]]] = deque()
        self._fenced_blocks = 0
        self._reserved = 0
        self._timers: list[tuple[float, str]] = []
        self._preemptions = self._never_fit = self._recomputes = self._unknown = 0
        self._prefix_queries = self._prefix_hits = 0

    # ------------------------------------------------------------------------------------------------------ intake

    def add(
        self,
        request: GenerateRequest,
        now: float,
        *,
        kind: Kind = Kind.LOCAL,
        attempt: str = "",
        peer_url: str = "",
        peer_epoch: str = "",
        skip_blocks: int = 0,
        constraint: Constraint | None = None,
    ) -> str:
        """Queue a request and return its scheduler id. Raises InvalidRequest, NeverFits or Overloaded."""
        sid = attempt or request.request_id
        self._check_fits(request, kind)
        if sid in self._live or self.handoffs.known(attempt):
            # An ended attempt may still hold blocks: a repeated call must not take its holds over.
            raise InvalidRequest(f"request id {sid!r} is already in progress; use a new one", param="request_id")
        if len(self._waiting) >= self.config.max_waiting:
            raise Overloaded(
                f"{len(self._waiting)} requests wait already (limit --max-waiting {self.config.max_waiting}); "
                "retry later",
                status=429,
            )
        prompt_len = len(request.prompt_token_ids)
        new_tokens = 1 if kind is Kind.SEND else request.sampling.max_tokens
        seq = Sequence(
            sid=sid,
            request=request,
            kind=kind,
            arrival_s=now,
            deadline_s=now + request.timeout_s,
            queue_deadline_s=now + min(request.timeout_s, self.config.queue_timeout_s),
            end_len=min(prompt_len + new_tokens, self.max_model_len),
            tokens=list(request.prompt_token_ids),
            attempt=attempt,
            peer_url=peer_url,
            peer_epoch=peer_epoch,
            skip_blocks=skip_blocks,
            constraint=constraint,
        )
        self._live[sid] = seq
        self._enqueue(seq)
        heapq.heappush(self._timers, (seq.queue_deadline_s, sid))
        heapq.heappush(self._timers, (seq.deadline_s, sid))
        return sid

    def _check_fits(self, request: GenerateRequest, kind: Kind) -> None:
        length = len(request.prompt_token_ids)
        if length == 0:
            raise InvalidRequest("prompt is empty; give at least one token", param="prompt")
        if request.sampling.max_tokens < 1:
            raise InvalidRequest(f"max_tokens {request.sampling.max_tokens} must be 1 or more", param="max_tokens")
        longest = self.max_model_len - 1
        if length > longest:
            self._never_fit += 1
            raise NeverFits(
                f"prompt has {length} tokens; this service takes at most {longest} "
                f"(max_model_len {self.max_model_len} less one generated token); shorten the prompt",
                param="prompt",
            )
        new_tokens = 1 if kind is Kind.SEND else request.sampling.max_tokens
        total = min(length + new_tokens, self.max_model_len)
        need = self.blocks.peak(total)
        if need > self.pool.usable:
            self._never_fit += 1
            raise NeverFits(
                f"prompt plus output of {total} tokens needs {need} KV blocks, the pool has {self.pool.usable} usable; "
                "shorten the prompt or lower max_tokens",
                param="max_tokens",
            )

    def abort(self, request_id: str, attempt: str, reason: str) -> list[Effect]:
        """End an attempt, or with an empty `attempt` the request, in any phase. Unknown ids are counted and ignored."""
        if attempt:
            named = self._live.get(attempt)
            found = [] if named is None else [named]
        else:
            found = [s for s in self._live.values() if s.request.request_id == request_id]
        self._unknown += not found
        effects: list[Effect] = []
        for seq in found:
            effects += self._end(seq, FinishReason.ABORT, Cancelled(reason))
        return effects

    def abort_all(self, error: RequestError) -> list[Effect]:
        """End everything with one error (drain deadline, broken executor)."""
        return [e for seq in list(self._live.values()) for e in self._end(seq, FinishReason.ERROR, error)]

    # --------------------------------------------------------------------------------------------------- deadlines

    def next_deadline(self) -> float | None:
        """When `tick` must run next; None while nothing is live."""
        while self._timers and self._timers[0][1] not in self._live:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def tick(self, now: float) -> list[Effect]:
        """End requests whose deadline has passed."""
        effects: list[Effect] = []
        while self._timers and self._timers[0][0] <= now:
            _, sid = heapq.heappop(self._timers)
            seq = self._live.get(sid)
            if seq is None:
                continue
            if now >= seq.deadline_s:
                error = f"request ran past its timeout of {seq.request.timeout_s:g} s while {seq.phase.value}"
            elif not seq.started and seq.phase is Phase.WAITING and now >= seq.queue_deadline_s:
                error = f"request waited {now - seq.arrival_s:.1f} s for KV blocks or a batch row; retry later"
            else:
                continue
            effects += self._end(seq, FinishReason.ERROR, DeadlineExceeded(error))
        return effects

    # ---------------------------------------------------------------------------------------------------- planning

    def schedule(self, now: float) -> tuple[StepPlan | None, list[Effect]]:
        """Plan the next step: running requests first, then arrived and waiting ones. None when nothing can run."""
        plan, effects, preempted = self._schedule()
        if plan is None and preempted:
            # A request gave its own blocks up: others may be admitted now.
            plan, more, _ = self._schedule()
            effects += more
        return plan, effects

    def _schedule(self) -> tuple[StepPlan | None, list[Effect], bool]:
        budget = self.config.max_batched_tokens
        starts: list[RowStart] = []
        grown: list[RowBlocks] = []
        work: list[tuple[Sequence, int, Chunk]] = []
        effects: list[Effect] = []
        preempted = False
        for seq in list(self._running):
            if budget == 0:
                break
            count = min(seq.known - seq.scheduled, budget)
            if seq.phase is not Phase.RUNNING or seq.known >= seq.end_len or count <= 0:
                continue
            if seq.constraint is not None and seq.unseen:
                continue  # what it may draw next depends on a token that nobody has seen yet
            room, took = self._make_room(seq, seq.scheduled + count, effects)
            preempted |= took
            if not room:
                continue
            freed, nulled = self.blocks.trim(seq)
            self._release(seq, freed)
            grown += nulled + self._grow(seq, seq.scheduled + count)
            budget -= self._plan_chunk(seq, count, work)
        if not preempted:
            budget = self._admit(budget, starts, work, effects)
        work = [w for w in work if w[0].phase is Phase.RUNNING and w[1] == w[0].run]
        if not work:
            return None, effects, preempted
        self._step += 1
        # A row that was preempted after it was planned leaves no trace in this step.
        rows = {seq.row for seq, _, _ in work}
        plan = StepPlan(
            step=self._step,
            starts=tuple(s for s in starts if s.row in rows),
            grown=tuple(g for g in grown if g.row in rows),
            chunks=tuple(chunk for _, _, chunk in work),
            num_tokens=sum(chunk.num_tokens for _, _, chunk in work),
            masks=tuple(mask for seq, _, chunk in work if (mask := _mask(seq, chunk)) is not None),
        )
        for seq, _, chunk in work:
            seq.unseen += chunk.draws
            seq.last_step = self._step
        self._in_flight.append((self._step, work))
        return plan, effects, preempted

    def _plan_chunk(self, seq: Sequence, count: int, work: list[tuple[Sequence, int, Chunk]]) -> int:
        draws = 1 if seq.scheduled + count == seq.known else 0
        work.append((seq, seq.run, Chunk(seq.row, seq.scheduled, count, draws)))
        seq.scheduled += count
        return count

    def _admit(
        self, budget: int, starts: list[RowStart], work: list[tuple[Sequence, int, Chunk]], effects: list[Effect]
    ) -> int:
        for seq in list(self._ready):
            if seq.phase is not Phase.READY:
                continue  # preempted while an older arrival made room
            if budget == 0 or not self._rows:
                return budget
            short = self._free_unreserved() < self.blocks.missing(seq, seq.known)
            # With nothing running nobody else will give blocks back: the newest arrival must.
            if short and (self._running or not self._make_room(seq, seq.known, effects)[0]):
                return budget
            self._ready.remove(seq)
            budget -= self._start(seq, budget, starts, work)
        for seq in list(self._waiting):
            receives = seq.kind is Kind.RECEIVE and not seq.started
            if not receives and (budget == 0 or not self._rows):
                continue
            if seq.unseen:
                # Preempted while a sample is in flight: its tokens are not all known yet.
                continue
            self.blocks.hash_prompt(seq)
            hits = self.blocks.find_hits(seq, seq.prompt_len if receives else len(seq.tokens) - 1)
            need = self.blocks.peak(len(seq.tokens) if receives else len(seq.tokens) + 1)
            held = sum(1 for ids in hits.blocks for b in ids if b)
            fresh = max(need - held, self._still_missing(len(seq.tokens), hits.blocks))
            # A receiver's blocks cannot be preempted: every running request must still be able to finish beside them.
            if receives and not self._leaves_room(need):
                break
            growth = len(self._running) if receives else 0
            if self._free_unreserved() < fresh + hits.evictable + growth:
                break
            self._waiting.remove(seq)
            if not seq.started:
                self._prefix_queries += len(seq.tokens)
                self._prefix_hits += hits.tokens
                seq.cached_tokens = hits.tokens
            self.blocks.take_hits(seq, hits)
            seq.scheduled = seq.written = hits.tokens
            if receives:
                effects.append(self.handoffs.reserve(seq))
                continue
            self._reserve(seq, fresh)
            budget -= self._start(seq, budget, starts, work)
        return budget

    def _leaves_room(self, need: int) -> bool:
        """Whether the largest running request could finish if `need` more blocks were held for a transfer."""
        largest = max((self.blocks.peak(seq.end_len) for seq in self._running), default=0)
        lost = self.pool.counts().quarantined + self.handoffs.receiving_blocks()
        return need + lost + largest <= self.pool.usable

    def _still_missing(self, length: int, blocks: tuple[tuple[int, ...], ...]) -> int:
        want = -(-length // self.blocks.block_size)
        return sum(max(0, want - len(ids)) for ids in blocks) if len(blocks) == 1 else 0

    def _start(
        self, seq: Sequence, budget: int, starts: list[RowStart], work: list[tuple[Sequence, int, Chunk]]
    ) -> int:
        """Give the request a row and its first chunk."""
        seq.row = self._rows.pop()
        seq.phase = Phase.RUNNING
        seq.started = True
        seq.run += 1
        bisect.insort(self._running, seq, key=lambda s: s.rank)
        count = min(seq.known - seq.scheduled, budget)
        self._grow(seq, seq.scheduled + count)
        table = tuple(tuple(ids) for ids in seq.blocks)
        starts.append(RowStart(seq.row, seq.sid, tuple(seq.tokens), seq.prompt_len, table, seq.request.sampling))
        return self._plan_chunk(seq, count, work)

    def _grow(self, seq: Sequence, upto: int) -> list[RowBlocks]:
        grown = self.blocks.grow(seq, upto)
        taken = sum(len(g.block_ids) for g in grown)
        # Once the prompt is covered the gate's reservation has done its work.
        self._reserve(seq, 0 if upto >= seq.known else max(0, seq.reserved - taken))
        return grown

    def _reserve(self, seq: Sequence, count: int) -> None:
        self._reserved += count - seq.reserved
        seq.reserved = count

    def _free_unreserved(self) -> int:
        return self.pool.num_free - self._reserved

    # -------------------------------------------------------------------------------------------------- preemption

    def _make_room(self, seq: Sequence, upto: int, effects: list[Effect]) -> tuple[bool, bool]:
        """Find blocks for `seq` to reach `upto`, from newer requests if need be: (found, somebody was preempted)."""
        need = self.blocks.missing(seq, upto)
        took = False
        while self.pool.num_free < need:
            if self.pool.num_free + self._fenced_blocks >= need:
                return False, took  # a step in flight gives them back
            victim = max(self._running + self._ready, key=lambda s: s.rank)
            if victim is seq:
                if len(self._running) + len(self._ready) > 1 or self._others_hold():
                    self._preempt(seq)
                else:
                    # Nobody else will ever give a block back, and the admission check said it fits: quarantine ate it.
                    message = (
                        f"needs {need} more KV blocks, {self.pool.num_free} are free and nobody else holds any "
                        f"({self.pool.counts().quarantined} quarantined); retry when the peer is back"
                    )
                    effects += self._end(seq, FinishReason.ERROR, EngineFailed(message))
                return False, True
            self._preempt(victim)
            took = True
        return True, took

    def _others_hold(self) -> bool:
        """Whether blocks will come back within a deadline: transfers in either direction, or fenced ones."""
        return self._fenced_blocks > 0 or self.handoffs.holding()

    def _preempt(self, seq: Sequence) -> None:
        """Give everything back; the prompt and what was generated are computed again later."""
        self._preemptions += 1
        self._leave(seq)
        seq.phase = Phase.WAITING
        seq.scheduled = seq.written = 0
        self._enqueue(seq)

    def _enqueue(self, seq: Sequence) -> None:
        bisect.insort(self._waiting, seq, key=lambda s: s.rank)

    def _leave(self, seq: Sequence) -> None:
        """Take the request out of its queue, row and blocks."""
        for queue in (self._running, self._ready, self._waiting):
            if seq in queue:
                queue.remove(seq)
        if seq.row >= 0:
            self._rows.append(seq.row)
            seq.row = -1
        self._reserve(seq, 0)
        if seq.phase is Phase.RECEIVING:
            self._release(seq, self.handoffs.detach(seq))
        else:
            self._release(seq, self.blocks.take_all(seq))
        seq.run += 1

    def _release(self, seq: Sequence, ids: list[int]) -> None:
        """Return blocks now, or when the last step that may write them completes."""
        if not ids:
            return
        if self._in_flight and seq.last_step >= self._in_flight[0][0]:
            self._fenced.append((seq.last_step, ids))
            self._fenced_blocks += len(ids)
        else:
            self.pool.release(ids)

    # ----------------------------------------------------------------------------------------------------- results

    def complete(self, output: StepOutput, now: float) -> list[Effect]:
        """Take the result of the oldest step in flight."""
        step, work = self._in_flight.popleft()
        assert output.step == step, f"result of step {output.step}, expected {step}"
        effects: list[Effect] = []
        for (seq, run, chunk), drawn in zip(work, output.rows, strict=True):
            assert len(drawn.tokens) == chunk.draws, f"{len(drawn.tokens)} tokens drawn of {chunk.draws}"
            seq.unseen -= chunk.draws
            if seq.phase is Phase.ENDED:
                continue
            if run == seq.run:
                seq.written = chunk.start + chunk.num_tokens
                self.blocks.publish(seq)
                if seq.kind is Kind.SEND:
                    effects += self.handoffs.blocks_written(seq)
            if drawn.tokens:
                effects += self._sampled(seq, drawn.tokens[0], drawn.logprobs[0] if drawn.logprobs else None, now)
        for _ in range(len(self._fenced)):
            last, ids = self._fenced.popleft()
            if last <= step:
                self._fenced_blocks -= len(ids)
                self.pool.release(ids)
            else:
                self._fenced.append((last, ids))
        return effects

    def _sampled(self, seq: Sequence, token: int, logprob: TokenLogprobs | None, now: float) -> list[Effect]:
        if seq.kind is Kind.SEND:
            if seq.phase is not Phase.RUNNING:
                return []  # preempted meanwhile: the blocks are gone, the prompt is computed again
            effects = self.handoffs.prompt_done(seq, token, logprob)
            seq.prompt_done_s = now
            self._leave(seq)
            seq.phase = Phase.SENDING
            return effects
        seq.tokens.append(token)
        return self._emit_token(seq, token, logprob)

    def _emit_token(self, seq: Sequence, token: int, logprob: TokenLogprobs | None) -> list[Effect]:
        reason: FinishReason | None = None
        if token in seq.request.sampling.stop_token_ids:
            reason = FinishReason.STOP
        elif len(seq.tokens) >= seq.end_len:
            reason = FinishReason.LENGTH
        first = len(seq.tokens) == seq.prompt_len + 1
        chunk = TokenChunk(
            token_ids=(token,),
            logprobs=() if logprob is None else (logprob,),
            finish_reason=reason,
            cached_tokens=seq.cached_tokens if first else 0,
            note=seq.note if first else "",
        )
        if reason is not None:
            self._forget(seq)
        return [Emit(seq.sid, chunk)]

    def _end(self, seq: Sequence, reason: FinishReason, error: RequestError) -> list[Effect]:
        """End a request early, from any phase."""
        error = error.located(seq.phase.value, seq.attempt)
        effects: list[Effect] = []
        if seq.attempt and self.handoffs.open(seq.attempt):
            effects.append(CancelAttempt(seq.attempt, error.message))
        self._forget(seq)
        effects.append(Emit(seq.sid, TokenChunk(finish_reason=reason, error=error)))
        return effects

    def _forget(self, seq: Sequence) -> None:
        self._leave(seq)
        seq.phase = Phase.ENDED
        del self._live[seq.sid]

    # --------------------------------------------------------------------------------------------- handoff results

    def received(self, attempt: str, record: PrefillRecord) -> list[Effect]:
        """The KV of `attempt` has arrived and verified: the request may run."""
        seq = self._live.get(attempt)
        if seq is None or seq.phase is not Phase.RECEIVING or not self.handoffs.received(attempt):
            self._unknown += 1
            return []
        seq.phase = Phase.READY
        seq.note = "transferred"
        seq.scheduled = seq.written = seq.prompt_len
        self.blocks.publish(seq)
        seq.started = True
        logprob = None if record.first_logprobs is None else TokenLogprobs(*record.first_logprobs)
        seq.tokens.append(record.first_token)
        effects = self._emit_token(seq, record.first_token, logprob)
        if seq.phase is Phase.READY:
            bisect.insort(self._ready, seq, key=lambda s: s.rank)
        return effects

    def transfer_failed(self, attempt: str, error: RequestError) -> list[Effect]:
        """The KV did not move. Prefill and `Fail` end the request; `Recompute` computes the prompt here."""
        seq = self._live.get(attempt)
        if seq is None or seq.kind is Kind.LOCAL or seq.phase in (Phase.READY, Phase.ENDED):
            self._unknown += 1
            return []
        if seq.kind is Kind.SEND or not self._recompute:
            return self._end(seq, FinishReason.ERROR, error)
        # Blocks under a writer stay with the attempt until the handoff says whether the peer has drained.
        self._leave(seq)
        self._recomputes += 1
        seq.kind, seq.note, seq.phase = Kind.LOCAL, "recomputed", Phase.WAITING
        seq.started = True
        self._enqueue(seq)
        return []

    def refuse_receive(self, attempt: str, error: RequestError) -> list[Effect]:
        """The transfer could not open the leg that was just reserved: nobody writes, the request ends."""
        effects = self._end(self._live[attempt], FinishReason.ERROR, error)
        self.handoffs.released(attempt, True)
        return effects

    def sent(self, attempt: str) -> Sequence | None:
        """Everything was sent: the request ends well. None when it is gone."""
        seq = self._live.get(attempt)
        if seq is None or seq.kind is not Kind.SEND:
            self._unknown += 1
            return None
        self._forget(seq)
        return seq

    def released(self, attempt: str, drained: bool) -> None:
        """The handoff will not touch the blocks again, or (drained False) only the peer may."""
        self._unknown += not self.handoffs.released(attempt, drained)

    def drained(self, attempt: str) -> None:
        """A quarantined attempt's peer is drained: its blocks return."""
        self._unknown += not self.handoffs.drained(attempt)

    # ------------------------------------------------------------------------------------------------------- views

    @property
    def has_work(self) -> bool:
        """Whether any request is live or any step in flight."""
        return bool(self._live or self._in_flight)

    @property
    def in_flight(self) -> int:
        """Steps submitted and not completed."""
        return len(self._in_flight)

    def live(self) -> Iterable[Sequence]:
        """Every live request."""
        return self._live.values()

    def stats(self) -> SchedulerStats:
        """Counts, O(live)."""
        phases = [seq.phase for seq in self._live.values()]
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting) + len(self._ready),
            receiving=phases.count(Phase.RECEIVING),
            sending=phases.count(Phase.SENDING),
            preemptions=self._preemptions,
            never_fit=self._never_fit,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            recomputes=self._recomputes,
            unknown_events=self._unknown,
        )

    def check(self) -> None:
        """Assert that every block is accounted for. Raises AssertionError."""
        self.pool.check()
        assert self._reserved == sum(seq.reserved for seq in self._live.values()), "reservations do not add up"
        rows = sorted(self._rows + [seq.row for seq in self._running])
        assert rows == list(range(self.config.max_num_seqs)), f"rows lost or shared: {rows}"
        if not self.has_work and self.handoffs.idle():
            counts = self.pool.counts()
            assert counts.owned == counts.writing == 0, f"idle, yet blocks are held: {counts}"


def _mask(seq: Sequence, chunk: Chunk) -> RowMask | None:
    if seq.constraint is None or not chunk.draws:
        return None
    allowed = seq.constraint.allowed(seq.tokens[seq.prompt_len :])
    return None if allowed is None else RowMask(chunk.row, (allowed,))
