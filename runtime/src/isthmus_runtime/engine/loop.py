"""The engine thread: takes commands and transfer events, plans a step while another runs, hands out results.

Everything enters through one inbox, so that the scheduler has one caller. With nothing to run the thread blocks on
the inbox until the next deadline: an idle engine costs nothing.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from ..errors import EngineFailed, InvalidRequest, RequestError, TransferFailed
from ..interfaces.handoff import (
    Drained,
    Failed,
    HandoffEvent,
    HandoffStats,
    KvHandoff,
    Received,
    Released,
    SendJob,
    Sent,
)
from ..interfaces.steps import Constraint, Executor, StepOutput
from ..kv.pool import PoolCounts
from ..protocol import CommitCall, PrefillAnswer, PrefillCall, Ticket
from ..request import FinishReason, GenerateRequest, TokenChunk
from .masks import MaskThread
from .scheduler import Scheduler
from .sequence import CancelAttempt, Effect, Emit, FinishSend, Kind, OpenReceive, SchedulerStats, SendBlocks

log = logging.getLogger(__name__)

STEPS_IN_FLIGHT = 2
"""Step N+1 is planned and queued while step N runs."""

Reply = TokenChunk | Ticket | PrefillAnswer
Sink = Callable[[Sequence[tuple[str, Reply]]], None]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What metrics and /info show."""

    stats: SchedulerStats
    blocks: PoolCounts


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
    ) -> None:
        """`sink` receives batches of (scheduler id, reply) on the engine thread and must not block."""
        self.scheduler = scheduler
        self._executor = executor
        self._sink = sink
        self._clock = clock
        self._inbox: queue.SimpleQueue[Callable[[float], list[Effect]] | None] = queue.SimpleQueue()
        self._in_flight: deque[Future[StepOutput]] = deque()
        self._handoff = None if handoff is None else handoff(self._on_handoff)
        self._masks = MaskThread(lambda: self._inbox.put(lambda now: []))
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        self._wake = True
        """Whether the last turn changed something that may allow another plan without a new event."""
        self.transfer_failures: Counter[str] = Counter()
        """Failed transfers by stage."""
        self.failure: str = ""
        """Why the engine is broken; empty while it works."""
        self.last_progress_s = clock()
        self.steps = 0
        self.snapshot = Snapshot(scheduler.stats(), scheduler.pool.counts())
        """Counts as of the last turn; replaced whole, so any thread may read it."""

    # ---------------------------------------------------------------------------------------- commands, any thread

    def start(self) -> None:
        """Start the threads."""
        self._masks.start()
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
            self.scheduler.add(
                request,
                now,
                kind=kind,
                attempt=name,
                peer_url=peer_url,
                peer_epoch=peer_epoch,
                constraint=beside,
            )
            return []

        self._add(name or request.request_id, name, command)

    def prefill(self, call: PrefillCall, constraint: Constraint | None = None) -> None:
        """Compute a prompt and send its KV as the ticket says; the reply is a PrefillAnswer or an ending chunk."""
        beside = self._beside(constraint)
        request = call.request.to_request()

        def command(now: float) -> list[Effect]:
            if self._handoff is None:
                raise InvalidRequest("this engine has no KV transfer; start it with --transfer-mode direct or store")
            skip = call.ticket.skip_blocks
            self.scheduler.add(request, now, kind=Kind.SEND, attempt=call.attempt, skip_blocks=skip, constraint=beside)
            self.scheduler.handoffs.open_send(call.attempt)
            job = SendJob(
                request_id=request.request_id,
                attempt=call.attempt,
                ticket=call.ticket,
                deadline_s=now + request.timeout_s,
            )
            self._handoff.open_send(job, now)
            return []

        self._add(call.attempt, call.attempt, command)

    def commit(self, call: CommitCall) -> None:
        """The router's word about the prefill leg of an attempt that is received here."""

        def command(now: float) -> list[Effect]:
            if self._handoff is not None:
                self._handoff.commit(call, now)
            if not call.ok and not self.scheduler.handoffs.open(call.attempt):
                # Prefill failed before any block was reserved here: there is no leg to fail.
                error = TransferFailed(call.reason, stage=call.stage or "prefill", attempt=call.attempt)
                return self.scheduler.transfer_failed(call.attempt, error)
            return []

        self._inbox.put(command)

    def abort(self, request_id: str, attempt: str, reason: str, *, answer: bool = True) -> None:
        """End a request in any phase; unknown ids are ignored.

        `answer` False: its caller is gone. A last chunk would reach whoever uses the same id next.
        """

        def command(now: float) -> list[Effect]:
            effects = self.scheduler.abort(request_id, attempt, reason)
            return effects if answer else [e for e in effects if not isinstance(e, Emit)]

        self._inbox.put(command)

    def abort_all(self, error: RequestError) -> None:
        """End every request."""
        self._inbox.put(lambda now: self.scheduler.abort_all(error))

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

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread; live requests end with an error first."""
        self.abort_all(EngineFailed("the engine is shutting down"))
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self._masks.stop(timeout_s)
        if self._handoff is not None:
            self._handoff.close()

    def is_drained(self, attempt: str) -> bool:
        """For a peer: may no byte of this attempt leave this process any more?"""
        return self._handoff is None or self._handoff.is_drained(attempt)

    def handoff_stats(self) -> HandoffStats | None:
        """Counters of the transfer side; None without one."""
        return None if self._handoff is None else self._handoff.stats()

    def stalled_s(self) -> float:
        """Seconds with work and no progress; 0 when idle."""
        return self._clock() - self.last_progress_s if self.scheduler.has_work else 0.0

    def _beside(self, constraint: Constraint | None) -> Constraint | None:
        return None if constraint is None else self._masks.beside(constraint)

    def _add(self, sid: str, attempt: str, add: Callable[[float], list[Effect]]) -> None:
        def command(now: float) -> list[Effect]:
            if self.failure:
                return [_refused(sid, EngineFailed(self.failure).located("admission", attempt))]
            if not self.scheduler.has_work:
                self.last_progress_s = now
            try:
                return add(now)
            except RequestError as error:
                return [_refused(sid, error.located("admission", attempt))]

        self._inbox.put(command)

    def _on_handoff(self, event: HandoffEvent) -> None:
        self._inbox.put(lambda now: self._handoff_event(event, now))

    # ----------------------------------------------------------------------------------------------- engine thread

    def _run(self) -> None:
        while not self._stopping:
            try:
                self.step()
            except Exception as error:  # the last line of defence: no request may wait for a dead thread
                log.exception("engine step failed")
                self._break(f"{type(error).__name__}: {error}")

    def step(self) -> None:
        """One turn: inbox, deadlines, plan, submit, collect."""
        if self.turn():
            self.collect()

    def turn(self) -> bool:
        """Inbox, deadlines, plan, submit. True: nothing is left to do before the oldest step in flight ends."""
        effects = self._take_inbox(wait=not self._in_flight and not self._can_plan())
        now = self._clock()
        effects += self.scheduler.tick(now)
        if self._handoff is not None:
            self._handoff.tick(now)
        planned = False
        if len(self._in_flight) < STEPS_IN_FLIGHT and not self.failure:
            plan, more = self.scheduler.schedule(now)
            effects += more
            if plan is not None:
                self._in_flight.append(self._executor.submit(plan))
                planned = True
        self._wake = planned
        self._apply(effects, now)
        self.snapshot = Snapshot(self.scheduler.stats(), self.scheduler.pool.counts())
        return bool(self._in_flight) and (len(self._in_flight) == STEPS_IN_FLIGHT or not planned)

    def collect(self) -> None:
        """Take the result of the oldest step in flight, waiting for it."""
        output = self._in_flight.popleft().result()
        now = self._clock()
        self.last_progress_s = now
        self.steps += 1
        self._wake = True
        self._apply(self.scheduler.complete(output, now), now)
        self.snapshot = Snapshot(self.scheduler.stats(), self.scheduler.pool.counts())

    def wakes_at(self) -> float | None:
        """When the next turn has something to do: now, at a deadline, or (None) only after a new command."""
        if self._in_flight or self._can_plan() or not self._inbox.empty():
            return self._clock()
        deadlines = [self.scheduler.next_deadline()]
        if self._handoff is not None:
            deadlines.append(self._handoff.next_deadline())
        return min((d for d in deadlines if d is not None), default=None)

    def _can_plan(self) -> bool:
        return self._wake and self.scheduler.has_work

    def _take_inbox(self, *, wait: bool) -> list[Effect]:
        effects: list[Effect] = []
        try:
            command = self._inbox.get(timeout=self._patience()) if wait else self._inbox.get_nowait()
            while True:
                if command is None:
                    self._stopping = True
                    return effects
                effects += command(self._clock())
                command = self._inbox.get_nowait()
        except queue.Empty:
            return effects

    def _patience(self) -> float | None:
        """How long the inbox may stay empty before a deadline needs us; None: forever."""
        wake = self.wakes_at()
        return None if wake is None else max(0.0, wake - self._clock())

    def _apply(self, effects: list[Effect], now: float) -> None:
        replies: list[tuple[str, Reply]] = []
        for effect in effects:
            match effect:
                case Emit(sid, chunk):
                    replies.append((sid, chunk))
                case OpenReceive(job):
                    assert self._handoff is not None
                    try:
                        replies.append((job.attempt, self._handoff.open_receive(job, now)))
                    except RequestError as error:
                        refused = self.scheduler.refuse_receive(job.attempt, error)
                        replies += [(e.sid, e.chunk) for e in refused if isinstance(e, Emit)]
                case SendBlocks(attempt, blocks):
                    assert self._handoff is not None
                    self._handoff.send_blocks(attempt, blocks, now)
                case FinishSend(attempt, result):
                    assert self._handoff is not None
                    self._handoff.finish_send(attempt, result, now)
                case CancelAttempt(attempt, reason):
                    assert self._handoff is not None
                    self._handoff.cancel(attempt, reason, now)
        if replies:
            self._sink(replies)

    def _handoff_event(self, event: HandoffEvent, now: float) -> list[Effect]:
        match event:
            case Received(attempt=attempt, record=record):
                return self.scheduler.received(attempt, record)
            case Sent(attempt=attempt, sent_bytes=sent_bytes):
                seq = self.scheduler.sent(attempt)
                if seq is not None:
                    answer = PrefillAnswer(
                        attempt=attempt,
                        num_tokens=seq.prompt_len,
                        cached_tokens=seq.cached_tokens,
                        sent_bytes=sent_bytes,
                        transfer_s=max(0.0, now - seq.prompt_done_s),
                    )
                    self._sink([(attempt, answer)])
            case Failed(attempt=attempt, stage=stage, reason=reason, given_up=given_up):
                if given_up and attempt not in self.scheduler.queues.live:
                    # The answer to a request that ended here: neither a failure nor late.
                    return []
                self.transfer_failures[stage] += not given_up
                log.info("KV of attempt %s did not move (%s): %s", attempt, stage, reason)
                error = TransferFailed(reason, stage=stage, attempt=attempt)
                return self.scheduler.transfer_failed(attempt, error)
            case Released(attempt=attempt, drained=drained):
                self.scheduler.released(attempt, drained)
            case Drained(attempt=attempt):
                self.scheduler.drained(attempt)
        return []

    def _break(self, reason: str) -> None:
        """The executor or the loop itself failed: end every request, refuse new ones, keep answering."""
        self.failure = f"the engine failed and must be restarted: {reason}"
        self._in_flight.clear()
        self._apply(self.scheduler.abort_all(EngineFailed(self.failure)), self._clock())


def _refused(sid: str, error: RequestError) -> Emit:
    return Emit(sid, TokenChunk(finish_reason=FinishReason.ERROR, error=error))
