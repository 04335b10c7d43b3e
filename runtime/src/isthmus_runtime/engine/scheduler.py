"""Continuous batching as a pure state machine: requests and results in, step plans and effects out.

One token budget serves prefill chunks and decode tokens alike, and the time that a step may take bounds the chunks of
prompts (`pace`). No clock, no I/O, no randomness: time is an argument.

Why nothing hangs:
1. a request whose peak can never fit the pool is refused by `add`;
2. a request is admitted only when its whole prompt fits beside what admitted ones still need (their reservations);
3. the oldest running request may take blocks from newer ones (recompute preemption);
4. blocks held for transfers are bounded by the transfers' deadlines, and those requests hold no row;
5. every phase has a deadline, fired by `tick`.

Step N+1 may be planned while step N runs. Blocks that a running step may still write are *fenced*: they return to
the pool when that step has completed. What a completed step leaves to do with blocks waits (`settle`) until the answers
have gone, unless the device has nothing to do meanwhile: of a long prompt it takes longer than all the rest.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from ..config import SchedulerConfig
from ..errors import Cancelled, DeadlineExceeded, EngineFailed, InvalidRequest, Overloaded, RequestError
from ..interfaces.steps import Masks, StepOutput, StepPlan
from ..kv.plan import KvPlan
from ..kv.pool import BlockPool
from ..protocol.request import may_begin_early
from ..protocol.ticket import PrefillRecord
from ..request import FinishReason, GenerateRequest, TokenLogprobs
from .adapters import AdapterSlots
from .admission import Admission
from .blocks import SequenceBlocks
from .completion import TICKET_S, Completion
from .continuation import Continuation
from .draft_model import DraftModel
from .drafts import FIRST_FORCED, Speculation
from .fetches import Fetches
from .handoffs import Handoffs
from .in_flight import StepDraft, StepsInFlight
from .intake import Intake
from .pace import Pace
from .preemption import Preemption
from .queues import Queues
from .sequence import Effect, Kind, Phase, SchedulerStats, Sequence

WORD_S = 1.0
"""Decode that has noticed by itself that KV does not come waits so long for the router's word: prefill's end, of which
the router hears as well, is milliseconds away unless prefill hangs."""


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
        fetches: bool = False,
        late_masks: bool = False,
        max_loras: int = 0,
        draft_model: DraftModel | None = None,
    ) -> None:
        """`fetches`: prompts are read from a storage pool as far as it has them (needs one group without a window).
        `late_masks`: the executor waits for masks before it draws, so that their rows are planned ahead, too.

        `draft_model`: guesses tokens; None: each request's come from its own text, if any are wanted. `max_loras`:
        slots that the executor has for adapters.
        """
        self.config = config
        self.max_model_len = plan.max_model_len
        self.pool = pool
        self.blocks = SequenceBlocks(plan, pool, prefix_caching=pool.prefix_caching)
        self.handoffs = Handoffs(self.blocks, layout_digest, kv_heads)
        self.steps = StepsInFlight(pool)
        self.adapters = AdapterSlots(max_loras)
        self.queues = Queues(config.max_num_seqs, self.blocks, self.handoffs, self.steps, self.adapters)
        self.pace = Pace(config.max_step_s)
        self._intake = Intake(config, plan.max_model_len, self.blocks)
        self._preemption = Preemption(self.queues, self.blocks, self.handoffs, self.steps)
        enabled = fetches and pool.prefix_caching and [group.window for group in plan.groups] == [None]
        self._fetches = Fetches(self.queues, self.blocks, self.handoffs, self._look_again, enabled=enabled)
        self._admission = Admission(self.queues, self.blocks, self.handoffs, self._preemption, self.pace, self._fetches)
        self._speculation = Speculation(config.speculative_tokens, self.pace.times, draft_model)
        self._continuation = Continuation(
            self.queues, self.blocks, self.steps, self._admission, self._preemption, self._speculation, late_masks
        )
        self._timers: list[tuple[float, str]] = []
        self._completion = Completion(
            self.queues, self.blocks, self.handoffs, self.steps, self._speculation, self._look_again
        )
        self._recompute = recompute
        self._recomputes = self._unknown = 0

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
        masks: Masks | None = None,
    ) -> str:
        """Queue a request and return its scheduler id. Raises InvalidRequest, NeverFits or Overloaded."""
        seq = self._intake.admit(
            request,
            now,
            kind=kind,
            attempt=attempt,
            peer_url=peer_url,
            peer_epoch=peer_epoch,
            skip_blocks=skip_blocks,
            masks=masks,
        )
        if kind is not Kind.SEND:
            if masks is not None:
                seq.forced_share = FIRST_FORCED
            elif self._speculation.most and request.pooling is None:
                seq.drafter = self._speculation.drafter(seq.sid)
            self._continuation.may_hold |= masks is not None
        sid, waiting = seq.sid, len(self.queues.waiting)
        if sid in self.queues.live or self.handoffs.known(attempt):
            # An ended attempt may still hold blocks: a repeated call must not take its holds over.
            raise InvalidRequest(f"request id {sid!r} is already in progress; use a new one", param="request_id")
        if waiting >= self.config.max_waiting:
            raise Overloaded(
                f"{waiting} requests are already waiting (limit --max-waiting {self.config.max_waiting}); retry later",
                status=429,
            )
        if request.adapter is not None:
            self.adapters.arrived(request.adapter)
        self.queues.live[sid] = seq
        self.queues.enter(seq, Phase.WAITING)
        self._look_again(seq.queue_deadline_s, sid)
        self._look_again(seq.deadline_s, sid)
        return sid

    def _look_again(self, when: float, sid: str) -> None:
        heapq.heappush(self._timers, (when, sid))

    def abort(self, request_id: str, attempt: str, reason: str) -> list[Effect]:
        """End an attempt, or with an empty `attempt` the request, in any phase.

        Unknown ids are ignored: a request may have ended by itself, or with its connection, before the router's word.
        """
        if attempt:
            named = self.queues.live.get(attempt)
            found = [] if named is None else [named]
        else:
            found = [s for s in self.live() if s.request.request_id == request_id]
        effects: list[Effect] = []
        for seq in found:
            effects += self._completion.end(seq, FinishReason.ABORT, Cancelled(reason))
        return effects

    def abort_all(self, error: RequestError) -> list[Effect]:
        """End everything with one error (drain deadline, broken executor)."""
        return [e for seq in list(self.live()) for e in self._completion.end(seq, FinishReason.ERROR, error)]

    def end_masked(self, lost: Callable[[Masks], RequestError | None]) -> list[Effect]:
        """End those whose masks are `lost`, wherever they stand, with the error that it tells."""
        found = [(seq, lost(seq.masks)) for seq in self.live() if seq.masks is not None]
        return [e for seq, error in found if error for e in self._completion.end(seq, FinishReason.ERROR, error)]

    # --------------------------------------------------------------------------------------------------- deadlines

    def next_deadline(self) -> float | None:
        """When `tick` must run next; None while nothing is live."""
        while self._timers and self._timers[0][1] not in self.queues.live:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def tick(self, now: float) -> list[Effect]:
        """End requests whose deadline has passed."""
        effects: list[Effect] = []
        while self._timers and self._timers[0][0] <= now:
            _, sid = heapq.heappop(self._timers)
            seq = self.queues.live.get(sid)
            if seq is None:
                continue
            if now >= seq.deadline_s:
                error = f"request ran past its timeout of {seq.request.timeout_s:g} s while {seq.phase.value}"
            elif not seq.started and seq.phase is Phase.WAITING and now >= seq.queue_deadline_s:
                error = f"request waited {now - seq.arrival_s:.1f} s for KV blocks or a batch row; retry later"
            elif seq.phase is Phase.SENDING and now >= seq.prompt_done_s + TICKET_S and self.awaits_ticket(sid):
                error = f"decode has not reserved within {TICKET_S:g} s after the prompt was computed"
                effects += self._completion.end(seq, FinishReason.ERROR, Overloaded(error))
                continue
            elif seq.phase is Phase.UNTOLD and now >= seq.word_by_s:
                self.queues.withdraw(seq)
                effects += self._compute_here(seq)
                continue
            else:
                continue
            effects += self._completion.end(seq, FinishReason.ERROR, DeadlineExceeded(error))
        return effects

    # ---------------------------------------------------------------------------------------------------- planning

    def schedule(self, now: float) -> tuple[StepPlan | None, list[Effect]]:
        """Plan the next step: running requests first, then arrived and waiting ones. None when nothing can run."""
        self.settle()
        preempted = self._preemption.count
        draft = self._draft(now)
        if not draft.work and (draft.stuck or self._preemption.count > preempted):
            # A request gave its own blocks up: others may be admitted now.
            effects = draft.effects
            draft = self._draft(now)
            draft.effects[:0] = effects
        if not draft.work:
            return None, draft.effects
        plan = self.steps.submit(draft, self.adapters.take_loads())
        self.pace.submitted(plan, now)
        return plan, draft.effects

    def _draft(self, now: float) -> StepDraft:
        draft = StepDraft(self.config.max_batched_tokens, now)
        preempted = self._preemption.count
        self.adapters.begin()
        self._continuation.plan(draft)
        if self._preemption.count == preempted and not draft.stuck:
            self._admission.admit(draft)
        for seq in draft.stuck:
            need = self.blocks.missing(seq, seq.known)
            message = (
                f"needs {need} more KV blocks, {self.pool.num_free} are free and nothing else holds any; retry, and "
                "report it: it was admitted as one that fits"
            )
            draft.effects += self._completion.end(seq, FinishReason.ERROR, EngineFailed(message))
        for seq, error in draft.failed:
            draft.effects += self._completion.end(seq, FinishReason.ERROR, error)
        left = self._preemption.count > preempted or draft.stuck
        return draft.without_left() if left else draft

    @property
    def stale(self) -> bool:
        """Whether somebody ended whom the newest of several steps in flight still computes."""
        return self.steps.stale

    def without_ended(self, plan: StepPlan, now: float) -> StepPlan | None:
        """The newest step, which the executor gave back unbegun, without who has ended; None: it is not needed."""
        self.pace.withdrawn()
        left = self.steps.without_ended(plan)
        if left is not None:
            self.pace.submitted(left, now)
        else:
            self.adapters.give_back(plan.adapters)
        return left

    def complete(self, output: StepOutput, now: float) -> list[Effect]:
        """Take the result of the oldest step in flight, which ended at `now`. `settle` does the rest."""
        self.pace.completed(now)
        return self._completion.complete(output, now)

    def settle(self) -> None:
        """Make visible the blocks that completed steps have filled, and free those that nobody needs after them.

        `schedule` begins with it. Whoever gives answers calls it when they have gone.
        """
        self.blocks.publish()
        self.steps.lift()

    # --------------------------------------------------------------------------------------------------- adapters

    def retire_adapter(self, digest: str) -> None:
        """No new request may ask for it; those that are live go on with it."""
        self.adapters.retire(digest, self.steps.newest)

    def unused_adapters(self) -> list[str]:
        """Digests of retired ones that nothing needs any more, each told once: the executor may drop them."""
        steps = self.steps.steps
        return self.adapters.unused(steps[0][0] if steps else None)

    # --------------------------------------------------------------------------------------------- handoff results

    def received(self, attempt: str, record: PrefillRecord) -> list[Effect]:
        """The KV of `attempt` has arrived and verified: the request may run."""
        seq = self.queues.live.get(attempt)
        if seq is None or seq.phase is not Phase.RECEIVING or not self.handoffs.received(attempt):
            self._unknown += 1
            return []
        seq.note = "transferred"
        seq.scheduled = seq.written = seq.prompt_len
        self.blocks.wrote(seq)
        self.blocks.publish()
        seq.started = True
        seq.own().append(record.first_token)
        self.queues.withdraw(seq)
        self.queues.enter(seq, Phase.READY)
        logprobs = () if record.first_logprobs is None else (TokenLogprobs(*record.first_logprobs),)
        return [self._completion.emit(seq, (record.first_token,), logprobs)]

    def transfer_failed(self, attempt: str, error: RequestError, now: float) -> list[Effect]:
        """The KV did not move. Prefill and `Fail` end the request; `Recompute` computes the prompt here, and where the
        client may have its first token waits for the router to say which that is."""
        seq = self.queues.live.get(attempt)
        if seq is None or seq.phase is Phase.UNTOLD or not (seq.kind is Kind.SEND or seq.receives):
            # Gone, recomputed already, or arrived: a second word about the transfer is late.
            self._unknown += 1
            return []
        if seq.kind is Kind.SEND or not self._recompute:
            return self._completion.end(seq, FinishReason.ERROR, error)
        # Blocks under a writer stay with the attempt until the handoff says whether the peer has drained.
        self.queues.leave(seq)
        self._recomputes += 1
        if seq.committed or not may_begin_early(seq.request):
            return self._compute_here(seq)
        seq.word_by_s = now + WORD_S
        self._look_again(seq.word_by_s, seq.sid)
        self.queues.enter(seq, Phase.UNTOLD)
        return []

    def _compute_here(self, seq: Sequence) -> list[Effect]:
        seq.kind, seq.note, seq.started = Kind.LOCAL, "recomputed", True
        seq.want_scores()
        if seq.told is not None:
            seq.own().append(seq.told)
        self.queues.enter(seq, Phase.WAITING)
        return [] if seq.told is None else [self._completion.emit(seq, (seq.told,), ())]

    def committed(self, attempt: str, token: int | None) -> list[Effect]:
        """The router's word about the prefill leg of an attempt that is received here is there. `token`: the first one,
        if the client has it, which stays, whatever becomes of the KV."""
        seq = self.queues.live.get(attempt)
        if seq is None or not seq.receives:
            return []
        seq.committed = True
        if seq.request.sampling.prompt_logprobs < 0:
            seq.told = token
        if seq.phase is not Phase.UNTOLD:
            return []
        self.queues.withdraw(seq)
        return self._compute_here(seq)

    def awaits_ticket(self, attempt: str) -> Sequence | None:
        """The request that was begun without its ticket; None: it has it, or has ended."""
        seq = self.queues.live.get(attempt)
        return seq if seq is not None and self.handoffs.awaits_ticket(attempt) else None

    def begin_early(self, attempt: str) -> None:
        """The request that was just added has no ticket yet."""
        self.queues.live[attempt].early = True
        self.handoffs.open_send(attempt, ticket=False)

    def give_ticket(self, seq: Sequence, skip_blocks: int) -> list[Effect]:
        """Decode has reserved: what is computed may go, but for the `skip_blocks` that it has."""
        seq.skip_blocks = skip_blocks
        return self.handoffs.give_ticket(seq.attempt, skip_blocks)

    def refuse_receive(self, attempt: str, error: RequestError) -> list[Effect]:
        """The transfer could not open the leg that was just reserved: nobody writes, the request ends."""
        effects = self._completion.end(self.queues.live[attempt], FinishReason.ERROR, error)
        self.handoffs.released(attempt, True)
        return effects

    def sent(self, attempt: str) -> Sequence | None:
        """Everything was sent: the request ends well. None when it is gone."""
        seq = self.queues.live.get(attempt)
        if seq is None or seq.kind is not Kind.SEND:
            self._unknown += 1
            return None
        self._completion.forget(seq)
        return seq

    def fetched(self, attempt: str, blocks: int | None, now: float, *, fault: bool) -> None:
        """The storage pool gave the first `blocks` of a fetch, or (None) it failed: its request waits as before."""
        self._unknown += not self._fetches.ended(attempt, blocks, now, fault=fault)

    def released(self, attempt: str, drained: bool) -> None:
        """The handoff will not touch the blocks again, or (drained False) only the peer may."""
        self._unknown += not self.handoffs.released(attempt, drained)

    def drained(self, attempt: str) -> None:
        """A quarantined attempt's peer is drained: its blocks return."""
        self._unknown += not self.handoffs.drained(attempt)

    # ------------------------------------------------------------------------------------------------------- views

    @property
    def holds(self) -> bool:
        """Whether so many running requests wait for their newest tokens that none should be planned before those."""
        return self._continuation.holds

    @property
    def awaits_drafts(self) -> bool:
        """Whether drafts that requests wait for are being computed."""
        return self._speculation.busy

    @property
    def has_work(self) -> bool:
        """Whether any request is live or any step in flight."""
        return bool(self.queues.live or self.steps.steps)

    @property
    def in_flight(self) -> int:
        """Steps submitted and not completed."""
        return len(self.steps.steps)

    def live(self) -> Iterable[Sequence]:
        """Every live request."""
        return self.queues.live.values()

    def stats(self) -> SchedulerStats:
        """Counts, without a look at each request."""
        queues = self.queues
        return SchedulerStats(
            running=len(queues.running),
            waiting=len(queues.waiting) + len(queues.ready),
            receiving=queues.receiving,
            sending=queues.sending,
            preemptions=self._preemption.count,
            never_fit=self._intake.never_fit,
            prefix_queries=self._admission.prefix_queries,
            prefix_hits=self._admission.prefix_hits,
            fetching=queues.fetching,
            fetch_queries=self._fetches.queries,
            fetch_hits=self._fetches.hits,
            fetch_failures=self._fetches.failures,
            recomputes=self._recomputes,
            unknown_events=self._unknown,
            drafted=self._speculation.drafted,
            accepted=self._speculation.accepted,
            forced=self._speculation.forced,
        )

    def check(self) -> None:
        """Assert that every block is accounted for, once it is settled. Raises AssertionError."""
        self.pool.check()
        self.queues.check(self.config.max_num_seqs)
        if not self.has_work and self.handoffs.idle():
            counts = self.pool.counts()
            assert counts.owned == counts.writing == 0, f"idle, yet blocks are held: {counts}"
            self._fetches.check()
