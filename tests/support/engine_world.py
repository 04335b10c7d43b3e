"""Drives a real Scheduler and FakeExecutor with a virtual clock and up to two steps in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from isthmus_runtime.config import SchedulerConfig
from isthmus_runtime.engine.draft_model import DraftModel
from isthmus_runtime.engine.scheduler import Scheduler
from isthmus_runtime.engine.sequence import Effect, Kind, OpenReceive
from isthmus_runtime.errors import RequestError
from isthmus_runtime.executor.fake import ENTRY_BYTES, FakeAdapter, FakeExecutor, Windows
from isthmus_runtime.interfaces.steps import StepOutput
from isthmus_runtime.kv.groups import GroupPlan
from isthmus_runtime.kv.plan import KvPlan
from isthmus_runtime.kv.pool import BlockPool
from isthmus_runtime.protocol.ticket import PrefillRecord
from isthmus_runtime.request import (
    AdapterName,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenChunk,
    TokenLogprobs,
)

POISON = 0xA5


def make_plan(num_blocks: int, block_size: int, max_model_len: int, groups: tuple[GroupPlan, ...] = ()) -> KvPlan:
    groups = groups or (GroupPlan(block_size=block_size),)
    return KvPlan(
        num_blocks=num_blocks,
        usable_blocks=num_blocks - 1,
        block_size=block_size,
        bytes_per_block=block_size * ENTRY_BYTES,
        max_model_len=max_model_len,
        groups=groups,
        ranks=(),
    )


def request(
    rid: str, prompt: list[int], max_tokens: int, *, adapter: AdapterName | None = None, **sampling: object
) -> GenerateRequest:
    params = {"temperature": 0.0, **sampling}
    return GenerateRequest(
        request_id=rid,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **params),  # type: ignore[arg-type]
        adapter=adapter,
    )


@dataclass
class World:
    """One engine under test. `tokens[sid]` and `ends[sid]` collect what clients saw."""

    num_blocks: int = 33
    block_size: int = 4
    max_model_len: int = 64
    max_num_seqs: int = 4
    max_batched_tokens: int = 16
    depth: int = 2
    prefix_caching: bool = True
    poison: bool = True
    late_masks: bool = False
    fetches: bool = False
    speculative_tokens: int = 0
    max_loras: int = 0
    draft_model: DraftModel | None = None
    windows: Windows = (None,)
    """Of each KV group."""
    now: float = 0.0
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, list[TokenChunk]] = field(default_factory=dict)
    scores: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, num_groups=len(self.windows), prefix_caching=self.prefix_caching)
        self.executor = FakeExecutor(self.num_blocks, self.block_size, windows=self.windows)
        config = SchedulerConfig(
            max_batched_tokens=self.max_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            queue_timeout_s=100.0,
            speculative_tokens=self.speculative_tokens,
        )
        flying = self.depth * self.max_batched_tokens
        groups = tuple(
            GroupPlan(block_size=self.block_size, window=window, tokens_in_flight=0 if window is None else flying)
            for window in self.windows
        )
        plan = make_plan(self.num_blocks, self.block_size, self.max_model_len, groups)
        self.scheduler = Scheduler(
            config,
            plan,
            self.pool,
            layout_digest="fake",
            fetches=self.fetches,
            late_masks=self.late_masks,
            draft_model=self.draft_model,
            max_loras=self.max_loras,
        )
        self.in_flight: deque[StepOutput] = deque()
        self.steps = 0

    def add(self, req: GenerateRequest, **kwargs: object) -> str:
        sid = self.scheduler.add(req, self.now, **kwargs)  # type: ignore[arg-type]
        self.tokens[sid], self.ends[sid], self.scores[sid] = [], [], []
        return sid

    def load(self, name: str) -> AdapterName:
        """Make an adapter known, whose digest is its name."""
        adapter = AdapterName(name, name)
        self.executor.keep(FakeAdapter(name, 0))
        self.scheduler.adapters.add(adapter)
        return adapter

    def turn(self) -> bool:
        """One turn of the loop; False when nothing moved."""
        self.now += 0.01
        self.steps += 1
        self.take(self.scheduler.tick(self.now))
        for digest in self.scheduler.unused_adapters():
            self.executor.drop(digest)
        planned = False
        if len(self.in_flight) < self.depth:
            plan, effects = self.scheduler.schedule(self.now)
            self.take(effects)
            if plan is not None:
                planned = True
                assert plan.num_tokens <= self.max_batched_tokens
                self._poison_free()
                self.in_flight.append(self.executor.run(plan))
        moved = planned
        if self.in_flight and (len(self.in_flight) == self.depth or not planned):
            self.take(self.scheduler.complete(self.in_flight.popleft(), self.now))
            self.scheduler.settle()
            moved = True
        self.scheduler.check()
        return moved

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            assert self.turn(), f"work but no progress: {list(self.scheduler.live())}"
        raise AssertionError(f"not finished after {limit} turns: {list(self.scheduler.live())}")

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, tuple):
                sid, chunk = effect
                self.tokens[sid].extend(chunk.token_ids)
                self.scores[sid].extend(chunk.prompt_logprobs)
                if chunk.finish_reason is not None:
                    self.ends[sid].append(chunk)
            else:
                self.effects.append(effect)

    def fail(self, attempt: str, error: RequestError, *, alone: bool = False) -> None:
        """Its KV does not come, of which the router has told before, unless this engine is `alone` with it."""
        if not alone:
            self.take(self.scheduler.committed(attempt, None))
        self.take(self.scheduler.transfer_failed(attempt, error, self.now))

    def _poison_free(self) -> None:
        """Free blocks hold garbage: reading one changes the tokens."""
        if not self.poison:
            return
        for block in range(1, self.num_blocks):
            if self.pool.state(block).name == "FREE":
                view = self.executor.block_bytes(block)
                view[:] = bytes([POISON]) * len(view)

    def finish(self, sid: str) -> FinishReason:
        assert len(self.ends[sid]) == 1, f"{sid} ended {len(self.ends[sid])} times"
        reason = self.ends[sid][0].finish_reason
        assert reason is not None
        return reason


@dataclass
class Flood:
    """Clients whose prompts come from a peer, each with another one as soon as an answer has ended."""

    world: World
    clients: int
    prompt: int = 5
    priority: int = 0
    delay: int = 3
    """Turns until KV has arrived."""
    adapters: Sequence[AdapterName] = ()
    """In turn."""
    sent: int = 0
    ended: int = 0
    live: set[str] = field(default_factory=set)
    due: list[tuple[int, str]] = field(default_factory=list)

    def turn(self) -> None:
        world = self.world
        while len(self.live) < self.clients:
            self.sent += 1
            sid, prompt = f"r{self.sent}", [self.sent % 90, *range(1, self.prompt)]
            adapter = self.adapters[self.sent % len(self.adapters)] if self.adapters else None
            tokens = 12 if adapter is None else 2 + self.sent * 7919 % 19
            asked = replace(request(sid, prompt, tokens, adapter=adapter), priority=self.priority)
            world.add(asked, kind=Kind.RECEIVE, attempt=sid)
            self.live.add(sid)
        world.turn()
        self.due += [(world.steps + self.delay, e.job.attempt) for e in world.effects if isinstance(e, OpenReceive)]
        world.effects.clear()
        while self.due and self.due[0][0] <= world.steps:
            _, sid = self.due.pop(0)
            record = PrefillRecord(attempt=sid, num_tokens=self.prompt, first_token=5, key_digest="", block_bytes=0)
            world.take(world.scheduler.received(sid, record))
            world.scheduler.released(sid, True)
        ended = {sid for sid in self.live if world.ends[sid]}
        self.live -= ended
        self.ended += len(ended)
