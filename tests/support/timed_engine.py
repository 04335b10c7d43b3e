"""An `EngineLoop` on a fake clock, over a FakeExecutor whose steps take time by what is in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from engine_world import make_plan

from isthmus_runtime.config import SchedulerConfig
from isthmus_runtime.engine.exchange import Reply
from isthmus_runtime.engine.loop import EngineLoop
from isthmus_runtime.engine.scheduler import Scheduler
from isthmus_runtime.engine.step_time import attended
from isthmus_runtime.executor.fake import FakeExecutor
from isthmus_runtime.interfaces.steps import StepOutput, StepPlan
from isthmus_runtime.kv.pool import BlockPool
from isthmus_runtime.request import TokenChunk


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a step: about those of SmolLM2-135M on two cores."""

    step: float = 0.012
    row: float = 0.0007
    token: float = 0.0013
    pair: float = 0.0013 / 4000

    def __call__(self, plan: StepPlan) -> float:
        prompts = [(c.start, c.num_tokens) for c in plan.chunks if c.num_tokens > 1]
        tokens, pairs = sum(n for _, n in prompts), sum(attended(start, n) for start, n in prompts)
        return self.step + self.row * len(plan.chunks) + self.token * tokens + self.pair * pairs


class TimedExecutor(FakeExecutor):
    """Steps run one after the other and end when the test lets time pass."""

    def __init__(self, clock: Callable[[], float], cost: Callable[[StepPlan], float], num_blocks: int) -> None:
        super().__init__(num_blocks, 16)
        self._clock, self._cost = clock, cost
        self._queue: deque[tuple[StepPlan, Future[StepOutput]]] = deque()
        """The first one runs."""
        self._began = 0.0
        self.steps: list[tuple[float, float, StepPlan]] = []
        """(began, ended, plan) of every step that has ended."""

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        future: Future[StepOutput] = Future()
        self._queue.append((plan, future))
        if len(self._queue) == 1:
            self._begin()
        return future

    def _begin(self) -> None:
        """The first step that was not taken back."""
        while self._queue and not self._queue[0][1].set_running_or_notify_cancel():
            self._queue.popleft()
        self._began = self._clock()

    def next_end(self) -> float | None:
        return self._began + self._cost(self._queue[0][0]) if self._queue else None

    def finish(self) -> None:
        plan, future = self._queue.popleft()
        self.steps.append((self._began, self._clock(), plan))
        output = self.run(plan)
        self._begin()
        future.set_result(output)


class TimedEngine:
    """Runs the loop's turns when they are due, and notes when each reply came."""

    def __init__(
        self, cost: Callable[[StepPlan], float] | None = None, *, step_timeout_s: float = 120.0, **scheduler: object
    ) -> None:
        self.now = 0.0
        num_blocks = 4097
        self.executor = TimedExecutor(lambda: self.now, cost or Cost(), num_blocks)
        config = SchedulerConfig(**{"max_num_seqs": 64, **scheduler})  # type: ignore[arg-type]
        self.scheduler = Scheduler(config, make_plan(num_blocks, 16, 4096), BlockPool(num_blocks))
        self.replies: list[tuple[float, str, TokenChunk]] = []
        self.loop = EngineLoop(
            self.scheduler, self.executor, self._sink, clock=lambda: self.now, step_timeout_s=step_timeout_s
        )

    def _sink(self, replies: Sequence[tuple[str, Reply]]) -> None:
        for sid, reply in replies:
            assert isinstance(reply, TokenChunk)
            self.replies.append((self.now, sid, reply))

    def run(self, until: float = float("inf")) -> None:
        """Until that time, or until nothing is left to do."""
        while True:
            times = [t for t in (self.loop.wakes_at(), self.executor.next_end()) if t is not None]
            if not times or min(times) > until:
                break
            self.now = min(times)
            if self.executor.next_end() == self.now:
                self.executor.finish()
            self.loop.turn()
        if until != float("inf"):
            self.now = until

    def times(self, sid: str) -> list[float]:
        """When its tokens came."""
        return [at for at, who, chunk in self.replies if who == sid and chunk.token_ids]

    def ending(self, sid: str) -> TokenChunk:
        """Its one last chunk."""
        (last,) = [chunk for _, who, chunk in self.replies if who == sid and chunk.finish_reason is not None]
        return last
