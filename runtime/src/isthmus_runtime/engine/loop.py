"""The engine thread: takes commands and transfer events, plans a step while another runs, hands out results.

Everything enters through one inbox, so that the scheduler has one caller; the word that a step has ended does too. The
thread waits for the inbox alone, until the next deadline or the time to plan the next step: commands are obeyed while
a step runs, and an idle engine costs nothing.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from ..errors import EngineFailed, InvalidRequest, RequestError, TransferFailed
from ..interfaces.handoff import (
    HandoffEvent,
    HandoffStats,
    KvHandoff,
    SendJob,
)
from ..interfaces.steps import Adapter, AdapterHolder, Constraint, Executor, Masks, RowStart, StepOutput, StepPlan
from ..interfaces.transport import CLOSE_S
from ..kv.pool_records import PoolCounts
from ..protocol.calls import CommitCall
from ..protocol.ticket import Ticket
from ..request import AdapterName, GenerateRequest
from .draft_model import DraftModel
from .exchange import Exchange, Sink, refused
from .masks import MaskThread
from .scheduler import Scheduler
from .sequence import Effect, Kind, SchedulerStats

log = logging.getLogger(__name__)

STEPS_IN_FLIGHT = 2
"""Step N+1 is planned and queued while step N runs."""

MASK_PATIENCE_S = 0.005
"""Where requests with forced tokens are planned one step after the other, a step waits so long for their masks."""
STOP_S = 8.0
"""For an engine to end its requests and transfers. With the rest of what its process does at the end, within the 15 s
that pods have after their drain."""
DRAFT_PATIENCE_S = 0.2
"""It waits so long for a draft model, which has a prompt to compute before its first guess."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What metrics and /info show."""

    stats: SchedulerStats
    blocks: PoolCounts

    @property
    def kv_usage(self) -> float:
        """Share of usable KV blocks in use, 0 to 1; what is only cached is free."""
        blocks = self.blocks
        return 1 - (blocks.free + blocks.cached) / max(1, blocks.total - blocks.null)


class EngineLoop:
    """Owns the scheduler's thread. Public methods may be called from any thread and return at once."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        sink: Sink,
        *,
        handoff: Callable[[Callable[[HandoffEvent], None]], KvHandoff] | None = None,
        clock: Callable[[], float] = time.monotonic,
        step_timeout_s: float = 120.0,
        started: Callable[[Sequence[RowStart]], None] | None = None,
        adapters: AdapterHolder | None = None,
        draft_model: DraftModel | None = None,
        left: Callable[[float], object] = lambda timeout_s: None,
    ) -> None:
        """`sink` receives batches of (scheduler id, reply) on the engine thread and must not block; nor must `started`,
        which is told there of the rows that begin with a step.

        `left(timeout_s)` returns when what the sink was given has left this process, or the time has passed.
        `draft_model`: the scheduler's, started and stopped with the loop.
        `step_timeout_s`: a step that has not ended for so long never will; every request is told. `adapters`: the
        executor's, where it has any.
        """
        self.scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._step_timeout_s = step_timeout_s
        self._started = started
        self._adapters = adapters
        self._inbox: queue.SimpleQueue[Callable[[float], list[Effect]] | None] = queue.SimpleQueue()
        self._in_flight: deque[tuple[StepPlan, Future[StepOutput]]] = deque()
        self._handoff = None if handoff is None else handoff(self._on_handoff)
        self.exchange = Exchange(scheduler, self._handoff, sink, left)
        self._masks = MaskThread(lambda: self._inbox.put(_look_again))
        self._draft_model = draft_model
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        self._wake = True
        """Whether the last turn changed something that may allow another plan without a new event."""
        self.failure: str = ""
        """Why the engine is broken; empty while it works."""
        self.last_progress_s = self._step_since_s = clock()
        self.steps = 0
        self.snapshot = Snapshot(scheduler.stats(), scheduler.pool.counts())
        """Counts as of the last turn; replaced whole, so any thread may read it."""

    # ---------------------------------------------------------------------------------------- commands, any thread

    def start(self) -> None:
        """Start the threads."""
        self._masks.start()
        if self._draft_model is not None:
            self._draft_model.start(lambda: self._inbox.put(_look_again))
        self._thread.start()

    def generate(
        self,
        request: GenerateRequest,
        *,
        attempt: str = "",
        local_attempt: str = "",
        peer_url: str = "",
        peer_epoch: str = "",
        constraint: Constraint | None = None,
    ) -> None:
        """Run a request; with an attempt, its KV comes from a peer. A refusal arrives as the last chunk."""
        beside = self._beside(constraint)
        kind = Kind.RECEIVE if attempt else Kind.LOCAL
        name = attempt or local_attempt

        def command(now: float) -> list[Effect]:
            if kind is Kind.RECEIVE:
                self._check_moves_kv()
            self._check_masks(beside)
            self.scheduler.add(
                request,
                now,
                kind=kind,
                attempt=name,
                peer_url=peer_url,
                peer_epoch=peer_epoch,
                masks=beside,
            )
            return []

        self._add(name or request.request_id, name, command)

    def prefill(
        self, request: GenerateRequest, attempt: str, ticket: Ticket | None, constraint: Constraint | None = None
    ) -> None:
        """Compute a prompt and send its KV as the ticket says; the reply is a PrefillAnswer or an ending chunk. Without
        a ticket the first token comes before, unless it is the last; and `ticket` has to follow."""
        beside = self._beside(constraint)

        def command(now: float) -> list[Effect]:
            handoff = self._check_moves_kv()
            self._check_masks(beside)
            skip = 0 if ticket is None else ticket.skip_blocks
            self.scheduler.add(request, now, kind=Kind.SEND, attempt=attempt, skip_blocks=skip, masks=beside)
            if ticket is None:
                self.scheduler.begin_early(attempt)
                return []
            self.scheduler.handoffs.open_send(attempt)
            job = SendJob(
                request_id=request.request_id, attempt=attempt, ticket=ticket, deadline_s=now + request.timeout_s
            )
            handoff.open_send(job, now)
            return []

        self._add(attempt, attempt, command)

    def ticket(self, ticket: Ticket) -> None:
        """Decode has reserved for a prompt that was begun without its ticket. Ignored where that has ended."""

        def command(now: float) -> list[Effect]:
            seq = self.scheduler.awaits_ticket(ticket.attempt)
            if seq is None:
                return []
            job = SendJob(
                request_id=seq.request.request_id, attempt=seq.attempt, ticket=ticket, deadline_s=seq.deadline_s
            )
            effects = self.scheduler.give_ticket(seq, ticket.skip_blocks)
            self._check_moves_kv().open_send(job, now)
            return effects

        self._inbox.put(command)

    def commit(self, call: CommitCall) -> None:
        """The router's word about the prefill leg of an attempt that is received here."""

        def command(now: float) -> list[Effect]:
            effects = self.scheduler.committed(call.attempt, call.first_token)
            if self._handoff is not None:
                self._handoff.commit(call, now)
            if not call.ok and not self.scheduler.handoffs.open(call.attempt):
                # Prefill failed before any block was reserved here: there is no leg to fail.
                error = TransferFailed(call.reason, stage=call.stage or "prefill", attempt=call.attempt)
                effects += self.scheduler.transfer_failed(call.attempt, error, now)
            return effects

        self._inbox.put(command)

    def abort(self, request_id: str, attempt: str, reason: str, *, answer: bool = True) -> None:
        """End a request in any phase; unknown ids are ignored.

        `answer` False: its caller is gone. A last chunk would reach whoever uses the same id next.
        """

        def command(now: float) -> list[Effect]:
            effects = self.scheduler.abort(request_id, attempt, reason)
            return effects if answer else [e for e in effects if not isinstance(e, tuple)]

        self._inbox.put(command)

    def abort_all(self, error: RequestError) -> None:
        """End every request."""
        self._inbox.put(lambda now: self.scheduler.abort_all(error))

    def end_lost(self) -> None:
        """End every request whose constraint was `lost`, which nobody may have asked."""
        self._inbox.put(lambda now: self.scheduler.end_masked(self._masks.lost))

    def add_adapter(self, name: str, adapter: Adapter) -> None:
        """Requests that are handed over from now on may ask for it."""

        def command(now: float) -> list[Effect]:
            assert self._adapters is not None
            self._adapters.keep(adapter)
            self.scheduler.adapters.add(AdapterName(name, adapter.digest))
            return []

        self._inbox.put(command)

    def retire_adapter(self, digest: str) -> None:
        """No request that is handed over from now on may ask for it; its weights go when the last one has ended."""

        def command(now: float) -> list[Effect]:
            self.scheduler.retire_adapter(digest)
            return []

        self._inbox.put(command)

    def call(self, function: Callable[[], object], timeout_s: float = 5.0) -> object:
        """Run `function` on the engine thread and return its value (for tests and /info). TimeoutError when busy."""
        result: Future[object] = Future()

        def command(now: float) -> list[Effect]:
            try:
                result.set_result(function())
            except Exception as error:
                result.set_exception(error)
            return []

        self._inbox.put(command)
        return result.result(timeout_s)

    def after(self, function: Callable[[], None]) -> None:
        """Call `function` on the engine thread, after the commands given before and what they say, and before any reply
        to later ones."""

        def command(now: float) -> list[Effect]:
            self.exchange.apply(now)
            function()
            return []

        self._inbox.put(command)

    def stop(self, timeout_s: float = STOP_S) -> None:
        """End the threads and the transfers, all together within `timeout_s`; live requests end with an error first."""
        ends_at = self._clock() + timeout_s
        for_transfers = 0.0 if self._handoff is None else min(CLOSE_S, timeout_s / 2)

        def left(kept: float = for_transfers) -> float:
            return max(0.0, ends_at - kept - self._clock())

        self.abort_all(EngineFailed("the engine is shutting down"))
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join(left())
        self._masks.stop(left())
        if self._draft_model is not None:
            self._draft_model.stop(left())
        if self._handoff is not None:
            self._handoff.close(left(0.0))

    def is_drained(self, attempt: str) -> bool:
        """For a peer: may no byte of this attempt leave this process any more?"""
        return self._handoff is None or self._handoff.is_drained(attempt)

    def handoff_stats(self) -> HandoffStats | None:
        """Counters of the transfer side; None without one."""
        return None if self._handoff is None else self._handoff.stats()

    def stalled_s(self) -> float:
        """Seconds with work and no progress; 0 when idle, and while transfers, which have deadlines, are waited for."""
        return 0.0 if self._rests else self._clock() - self.last_progress_s

    @property
    def _rests(self) -> bool:
        """Whether there is nothing to compute before something arrives: a prompt may take a peer many minutes."""
        if not self.scheduler.has_work:
            return True
        queues = self.scheduler.queues
        return not (self._in_flight or self._wake) and queues.receiving + queues.sending + queues.fetching > 0

    def _check_moves_kv(self) -> KvHandoff:
        if self._handoff is None:
            raise InvalidRequest("this engine has no KV transfer; start it with --transfer-mode direct or store")
        return self._handoff

    def _check_masks(self, masks: Masks | None) -> None:
        lost = self._masks.lost(masks)  # since it was made; from now on `end_lost` finds it
        try:
            if lost is not None:
                raise lost
        finally:
            del lost  # or the error would hold this frame, and be held by it

    def _beside(self, constraint: Constraint | None) -> Masks | None:
        return None if constraint is None else self._masks.beside(constraint)

    def _add(self, sid: str, attempt: str, add: Callable[[float], list[Effect]]) -> None:
        def command(now: float) -> list[Effect]:
            if self.failure:
                return [refused(sid, EngineFailed(self.failure).located("admission", attempt))]
            try:
                return add(now)
            except RequestError as error:
                return [refused(sid, error.located("admission", attempt))]

        self._inbox.put(command)

    def _on_handoff(self, event: HandoffEvent) -> None:
        self._inbox.put(lambda now: self.exchange.heard(event, now))

    # ----------------------------------------------------------------------------------------------- engine thread

    def _run(self) -> None:
        while not self._stopping:
            try:
                self.turn()
            except Exception as error:  # the last line of defence: no request may wait for a dead thread
                log.exception("engine step failed")
                self._break(f"{type(error).__name__}: {error}")

    def turn(self) -> None:
        """One turn: wait until `wakes_at`, then commands, results, deadlines, and the next step.

        While a step runs, the answers of the one before it go before the next is planned. Otherwise the device waits,
        and goes before them.
        """
        self._take_inbox()
        now, effects = self._clock(), self.exchange.effects
        self._take_results(now)
        effects += self.scheduler.tick(now)
        if self._handoff is not None:
            self._handoff.tick(now)
        self._wake |= bool(effects)
        if self.scheduler.stale and len(self._in_flight) == STEPS_IN_FLIGHT:
            self._withdraw(now)
        plan_at = self._plan_at()
        if plan_at is not None and plan_at <= now:
            if self._in_flight:
                self.exchange.apply(now)
            plan, more = self.scheduler.schedule(now)
            effects += more
            self._wake = plan is not None
            if plan is not None:
                self._submit(plan)
        if self._adapters is not None:
            for digest in self.scheduler.unused_adapters():
                self._adapters.drop(digest)
        self.exchange.apply(now)
        self.scheduler.settle()
        self.snapshot = Snapshot(self.scheduler.stats(), self.scheduler.pool.counts())

    def wakes_at(self) -> float | None:
        """When the next turn has something to do: now, at a time, or (None) only after a new command."""
        if not self._inbox.empty():
            return self._clock()
        times = [self.scheduler.next_deadline(), self._plan_at()]
        if self._handoff is not None:
            times.append(self._handoff.next_deadline())
        if self._in_flight:
            times.append(self._step_since_s + self._step_timeout_s)
        wake = min((t for t in times if t is not None), default=None)
        return None if wake is None else max(wake, self._clock())

    def _plan_at(self) -> float | None:
        """When the next step is planned; None: not before something else happens."""
        if self.failure or not self._wake or len(self._in_flight) == STEPS_IN_FLIGHT or not self.scheduler.has_work:
            return None
        plan_at = self.scheduler.pace.plan_at()
        if self.scheduler.holds:
            if self._in_flight:
                return None
            if self._masks.busy:
                return max(plan_at, self.last_progress_s + MASK_PATIENCE_S)
            if self.scheduler.awaits_drafts:
                return max(plan_at, self.last_progress_s + DRAFT_PATIENCE_S)
        return plan_at

    def _submit(self, plan: StepPlan) -> None:
        if not self._in_flight:
            self._step_since_s = self._clock()
        if self._started is not None and plan.starts:
            self._started(plan.starts)
        future = self._executor.submit(plan)
        self._in_flight.append((plan, future))
        future.add_done_callback(lambda _: self._inbox.put(_step_ended))

    def _withdraw(self, now: float) -> None:
        """Take who has ended out of the step after the running one, unless it has begun too."""
        plan, future = self._in_flight[-1]
        if future.cancel():
            self._in_flight.pop()
            left = self.scheduler.without_ended(plan, now)
            if left is not None:
                self._submit(left)

    def _take_results(self, now: float) -> None:
        """The results of the steps that have ended, oldest first. Raises what broke the executor; what the steps before
        brought about is not lost then."""
        while self._in_flight and self._in_flight[0][1].done():
            output = self._in_flight.popleft()[1].result()
            self.last_progress_s = self._step_since_s = now
            self.steps += 1
            self._wake = True
            self.exchange.effects += self.scheduler.complete(output, now)
        if self._in_flight and now >= self._step_since_s + self._step_timeout_s:
            raise TimeoutError(f"a step has not ended for {self._step_timeout_s:g} s (--no-progress-timeout)")

    def _take_inbox(self) -> None:
        """Wait until there is something to do, and obey the commands that are there; those to come wait a turn."""
        rested = self._rests
        try:
            command = self._inbox.get(timeout=self._patience())
        except queue.Empty:
            return  # a time has come
        finally:
            if rested:
                self.last_progress_s = self._clock()
        for left in range(self._inbox.qsize(), -1, -1):
            if command is None:
                self._stopping = True
                break
            self._wake = True
            self.exchange.effects += command(self._clock())
            if left:
                command = self._inbox.get_nowait()

    def _patience(self) -> float | None:
        """How long the inbox may stay empty before a time comes that needs us; None: forever."""
        wake = self.wakes_at()
        return None if wake is None else max(0.0, wake - self._clock())

    def _break(self, reason: str) -> None:
        """The executor or the loop itself failed: end every request, refuse new ones, keep answering."""
        self.failure = f"the engine failed and must be restarted: {reason}"
        self._in_flight.clear()
        self.exchange.end(EngineFailed(self.failure), self._clock())


def _step_ended(now: float) -> list[Effect]:
    """The command that a step which ends puts into the inbox: `turn` then finds its result."""
    return []


def _look_again(now: float) -> list[Effect]:
    """The command of the threads beside this one: what a request waited for is there."""
    return []
