"""One engine process: the real loop, scheduler, pool, agent and fake executor, under the virtual clock.

A turn of the loop runs when a command has come, when a submitted step ends in virtual time (a command like any other),
or when the time has come that the loop waits for; other processes act in between. What `engine/backend.py` and
`engine/server.py` do over asyncio and HTTP (claim an id, frame replies, abort when the caller hangs up) is mirrored
here in `serve`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from ..config import SchedulerConfig, TransferConfig
from ..engine.exchange import Reply
from ..engine.loop import STEPS_IN_FLIGHT, EngineLoop
from ..engine.scheduler import Scheduler
from ..errors import EngineFailed, InvalidRequest
from ..executor.fake import ENTRY_BYTES, FakeExecutor, Windows
from ..interfaces.handoff import HandoffEvent, KvHandoff, Received
from ..interfaces.steps import StepOutput, StepPlan
from ..interfaces.transport import KvRegion
from ..kv.groups import GroupPlan, max_len_that_fits
from ..kv.plan import KvPlan
from ..kv.pool import BlockPool
from ..kv.prefix import BlockEvent
from ..protocol.calls import AbortCall, CommitCall, GenerateCall, PrefillAnswer, PrefillCall, TicketCall
from ..request import FinishReason, TokenChunk
from ..router.policy import Endpoint
from ..transfer.agent import TransferAgent
from ..transfer.backend import TransferBackend
from .clock import Clock, Violation
from .faults import Scenario
from .network import Exchange, peer_name

TURNS_AT_ONCE = 200
"""More turns than this at one instant is a busy loop."""


class VirtualExecutor:
    """`FakeExecutor` whose steps take time. The bytes move at the start or at the end of a step, as chance has it."""

    def __init__(
        self, clock: Clock, num_blocks: int, block_size: int, layout: str, step_s: float, windows: Windows
    ) -> None:
        self.fake = FakeExecutor(num_blocks, block_size, layout_digest=layout, windows=windows)
        self._clock = clock
        self._step_s = step_s
        self._ahead: deque[tuple[float, Future[StepOutput]]] = deque(maxlen=STEPS_IN_FLIGHT)
        """(end, result) of the newest steps."""
        self.dead = False

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        """Queue a step behind those in flight."""
        future: Future[StepOutput] = Future()
        while self._ahead and self._ahead[-1][1].cancelled():
            self._ahead.pop()
        start = max(self._clock.now, self._ahead[-1][0]) if self._ahead else self._clock.now
        took = self._step_s * (0.5 + self._clock.random.random()) * (1 + plan.num_tokens / 16)
        ends = start + took
        self._ahead.append((ends, future))
        early = self._clock.chance(0.5)
        output: list[StepOutput] = []

        def begin() -> None:
            if future.set_running_or_notify_cancel() and early and not self.dead:
                output.append(self.fake.run(plan))

        def end() -> None:
            if not self.dead and not future.cancelled():
                future.set_result(output[0] if output else self.fake.run(plan))

        self._clock.at(start, begin)
        self._clock.at(ends, end)
        return future

    def kv_region(self) -> KvRegion:
        """The pool."""
        return self.fake.kv_region()

    def close(self) -> None:
        """No step runs any more."""
        self.dead = True
        self.fake.close()


@dataclass(slots=True)
class _Stream:
    exchange: Exchange
    request_id: str
    attempt: str


def _kv_plan(scenario: Scenario, blocks: int, block_size: int) -> KvPlan:
    groups = tuple(
        GroupPlan(
            block_size=block_size,
            window=window,
            tokens_in_flight=0 if window is None else STEPS_IN_FLIGHT * scenario.budget,
        )
        for window in scenario.windows
    )
    return KvPlan(
        num_blocks=blocks,
        usable_blocks=blocks - 1,
        block_size=block_size,
        bytes_per_block=block_size * ENTRY_BYTES,
        max_model_len=max_len_that_fits(groups, blocks - 1, scenario.max_model_len),
        groups=groups,
        ranks=(),
    )


def _scheduler_config(scenario: Scenario) -> SchedulerConfig:
    return SchedulerConfig(
        max_batched_tokens=scenario.budget,
        max_step_s=scenario.max_step_s,
        max_num_seqs=scenario.rows,
        max_waiting=scenario.max_waiting,
        queue_timeout_s=scenario.queue_timeout_s,
    )


class VirtualEngine:
    """One process, from start to crash or stop. A restart is a new `Engine` under the same name."""

    def __init__(
        self,
        clock: Clock,
        scenario: Scenario,
        name: str,
        role: str,
        epoch: str,
        connect: Callable[[VirtualEngine], TransferBackend],
        on_step: Callable[[VirtualEngine], None],
        *,
        odd: bool = False,
    ) -> None:
        self.clock = clock
        self.name = name
        self.role = role
        self.epoch = epoch
        self.up = True
        self.draining = False
        self._on_step = on_step
        block_size = scenario.block_size * 2 if odd else scenario.block_size
        self.block_size = block_size
        self.layout = f"layout-{block_size}"
        blocks = scenario.prefill_blocks if role == "prefill" else scenario.decode_blocks
        plan = _kv_plan(scenario, blocks, block_size)
        self.mode = scenario.mode
        step_s = scenario.step_s * (1.0 if role == "prefill" else scenario.decode_slower)
        self.executor = VirtualExecutor(clock, blocks, block_size, self.layout, step_s, scenario.windows)
        self.published: deque[BlockEvent] = deque(maxlen=4096)
        self.pool = BlockPool(
            blocks, num_groups=len(plan.groups), prefix_caching=scenario.prefix_caching, events=self.published
        )
        self.scheduler = Scheduler(
            _scheduler_config(scenario),
            plan,
            self.pool,
            layout_digest=self.layout,
            recompute=scenario.recompute,
            fetches=scenario.mode == "store",
        )
        self.backend = connect(self)
        self.backend.prepare(self.executor.kv_region(), 1.0)
        self.agents: list[TransferAgent] = []
        self._transfer = TransferConfig(mode=scenario.mode, timeout_s=scenario.transfer_timeout_s)
        self.loop = EngineLoop(self.scheduler, self.executor, self._sink, handoff=self._handoff, clock=clock.time)
        self.orphans: dict[str, float] = {}
        """Attempts that hold blocks though their request has ended, and since when."""
        self._streams: dict[str, _Stream] = {}
        self._claims: Counter[str] = Counter()
        self._over: set[str] = set()
        """Ids whose last reply is out."""
        self._timer: float | None = None
        self._burst = (0.0, 0)

    def _handoff(self, notify: Callable[[HandoffEvent], None]) -> KvHandoff:
        """The loop's transfer agent, whose events are checked on their way."""

        def checked(event: HandoffEvent) -> None:
            if isinstance(event, Received) and event.record.attempt != event.attempt:
                raise Violation(f"attempt {event.attempt} took the record of attempt {event.record.attempt}")
            notify(event)

        region, clock = self.executor.kv_region(), self.clock.time
        agent = TransferAgent(self.backend, region, self._transfer, checked, clock, epoch=self.epoch)
        self.agents.append(agent)
        return agent

    @property
    def agent(self) -> TransferAgent:
        """The one transfer agent."""
        return self.agents[0]

    @property
    def endpoint(self) -> Endpoint:
        """What `/info` makes the router know."""
        return Endpoint(self.name, f"{self.layout}/abi", self.mode, self.epoch)

    def unanswered(self) -> list[str]:
        """Callers that wait though their request has ended. Meaningless while commands are queued."""
        if self.loop._inbox.empty():
            live = {seq.sid for seq in self.scheduler.live()}
            return [sid for sid in self._streams if sid not in live]
        return []

    @property
    def called(self) -> bool:
        """Whether a command waits."""
        return self.up and not self.loop._inbox.empty()

    @property
    def busy(self) -> bool:
        """Whether somebody waits for an answer."""
        return bool(self._streams)

    # ------------------------------------------------------------------------------------------- running the loop

    def poll(self) -> None:
        """Give the loop its thread: after a command, or when the deadline has come that it went to sleep with."""
        while self.up:
            wake = self.loop.wakes_at()
            if wake is None:
                self._timer = None
                self._idle()
                return
            if wake > self.clock.now:
                self._idle()
                self._wake_at(wake)
                return
            at, turns = self._burst
            self._burst = (self.clock.now, turns + 1 if at == self.clock.now else 0)
            if self._burst[1] > TURNS_AT_ONCE:
                raise Violation(f"{self.name} spins: {TURNS_AT_ONCE} turns at one instant")
            self.loop.turn()
            self._on_step(self)

    def _wake_at(self, when: float) -> None:
        if self._timer == when:
            return
        self._timer = when

        def fire() -> None:
            # A sleeping thread knows the deadline it slept with and no other.
            if self._timer == when:
                self._timer = None
                self.poll()

        self.clock.at(when, fire)

    def _idle(self) -> None:
        """The thread sleeps: whoever waits must wait for something that a deadline bounds."""
        if not self.scheduler.has_work or self.scheduler.in_flight:
            return
        waits = [seq for seq in self.scheduler.live() if seq.phase.value in ("waiting", "ready", "running")]
        if not waits or self.scheduler.handoffs._holds:
            return
        ids = [f"{seq.sid} {seq.phase.value} {seq.written}/{seq.end_len}" for seq in waits]
        raise Violation(f"{self.name} sleeps while work waits and nobody holds its blocks: {ids}; {self.pool.counts()}")

    # ------------------------------------------------------------------------------------------------ HTTP surface

    def serve(self, exchange: Exchange, body: object) -> None:
        """One call of the router."""
        match body:
            case GenerateCall():
                name = body.attempt or body.local_attempt
                if self._claim(name or body.request.request_id, exchange, body.request.request_id, name):
                    self.loop.generate(
                        body.request.to_request(),
                        attempt=body.attempt,
                        local_attempt=body.local_attempt,
                        peer_url=peer_name(body.prefill_url),
                        peer_epoch=body.prefill_epoch,
                    )
            case PrefillCall():
                if self._claim(body.attempt, exchange, body.request.request_id, body.attempt):
                    self.loop.prefill(body.request.to_request(), body.attempt, body.ticket)
                    if body.ticket is None:
                        exchange.push(TokenChunk())
            case TicketCall():
                self.loop.ticket(body.ticket)
                exchange.push({})
                exchange.end()
            case CommitCall():
                self.loop.commit(body)
                exchange.push({})
                exchange.end()
            case AbortCall():
                self.loop.abort(body.request_id, body.attempt, "aborted by the router")
                exchange.push({})
                exchange.end()
            case other:
                raise AssertionError(f"unknown call {other!r}")
        self.poll()

    def _claim(self, sid: str, exchange: Exchange, request_id: str, attempt: str) -> bool:
        if sid in self._streams:
            error = InvalidRequest(f"request id {sid!r} is already in progress; use a new one", param="request_id")
            exchange.push(TokenChunk(finish_reason=FinishReason.ERROR, error=error))
            exchange.end()
            return False
        self._streams[sid] = _Stream(exchange, request_id, attempt)
        self._claims[sid] += 1

        def closed() -> None:
            stream = self._streams.get(sid)
            if self.up and stream is not None and stream.exchange is exchange:
                del self._streams[sid]
                self.loop.abort(request_id, attempt, "the client disconnected", answer=False)
                self.poll()

        exchange.on_close = closed
        return True

    def _sink(self, replies: Sequence[tuple[str, Reply]]) -> None:
        for sid, reply in replies:
            ended = isinstance(reply, PrefillAnswer) or (
                isinstance(reply, TokenChunk) and reply.finish_reason is not None
            )
            # A second call under the same id (a proxy's retry) may hear the refusal of a first that hung up.
            if sid in self._over and self._claims[sid] == 1:
                raise Violation(f"{self.name}: {sid} got {_short(reply)} after its last reply")
            self._check_not_stuck(sid, reply)
            stream = self._streams.get(sid)
            if ended:
                self._over.add(sid)
                self._streams.pop(sid, None)
            if stream is None:
                continue
            self.clock.note(self.name, "reply", sid, _short(reply))
            stream.exchange.push(reply)
            if ended:
                stream.exchange.end()

    def _check_not_stuck(self, sid: str, reply: Reply) -> None:
        """What was admitted finishes: only blocks in quarantine may be missing for ever."""
        error = reply.error if isinstance(reply, TokenChunk) else None
        if error is None or "more KV blocks" not in error.message or self.pool.counts().quarantined:
            return
        raise Violation(f"{self.name}: {sid} was admitted and cannot finish: {error.message}")

    # -------------------------------------------------------------------------------------------------- end of life

    def crash(self) -> None:
        """The process is killed: connections break, nothing more is computed or sent."""
        self.up = False
        self.executor.close()
        for stream in self._streams.values():
            stream.exchange.end("connection reset")
        self._streams.clear()

    def drain(self, timeout_s: float, gone: Callable[[VirtualEngine], None]) -> None:
        """Take nothing new, finish what runs within `timeout_s`, then stop as SIGTERM does."""
        self.draining = True
        until = self.clock.now + timeout_s

        def look() -> None:
            if not self.up:
                return
            if self.clock.now < until and (self.busy or self.agent.stats().live):
                self.clock.after(0.02, look)
                return
            self.loop.abort_all(EngineFailed("the engine is shutting down"))
            self.poll()
            leave()

        def leave() -> None:
            if not self.up:
                return
            if self.scheduler.in_flight:
                self.clock.after(0.01, leave)
                return
            self.agent.close()
            self.crash()
            gone(self)

        look()


def _short(reply: Reply) -> object:
    if isinstance(reply, TokenChunk):
        error = "" if reply.error is None else f" {type(reply.error).__name__}: {reply.error.message}"
        return f"tokens {list(reply.token_ids)} {reply.finish_reason or ''}{error}"
    return type(reply).__name__
