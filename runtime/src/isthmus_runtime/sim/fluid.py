"""One engine of the planner, in units of its own steps.

V counts the steps an engine has run; dV/dt = 1 / step time. Its batch changes only where V is whole, so between two
such milestones nothing needs to be simulated, however many tokens pass: a request that joins at V ends at
V + its output length. What it keeps of `engine/scheduler.py`, `engine/pace.py` and `engine/loop.py`: messages are read
at once; a step is planned some time before the one that runs ends, so that what comes later goes into the step after
next; prompts go first come, first served, as many into one step as the token budget and the step's time take, beside
all that decodes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import floor

from ..engine.pace import LEAST_TOKENS, plan_ahead_s, prompt_seconds
from .hardware import Steps
from .traces import TraceRequest

NEVER = float("inf")


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way."""

    request: TraceRequest
    engine: FluidEngine
    """Where it generates."""
    generates: int
    """Tokens that the engine that computes its prompt generates after the first."""
    prefill: int = -1
    """Number of the prefill engine."""
    cached: int = 0
    moving_s: float = 0.0
    """From the end of its prompt's computation to the last byte of KV at the decode engine."""
    first_s: float = 0.0
    """When its first token left."""


class FluidEngine:
    """Prefill, decode or unified, by what it is given to do."""

    __slots__ = (
        "_chunk",
        "_context",
        "_ends",
        "_joins",
        "_max_step_s",
        "_on_end",
        "_on_first",
        "_order",
        "_prompts",
        "_steps",
        "_until",
        "at",
        "batch",
        "budget",
        "busy",
        "free",
        "held",
        "number",
        "planned",
        "queued",
        "slowed",
        "step",
        "v",
        "version",
        "waiting",
    )

    def __init__(
        self,
        number: int,
        steps: Steps,
        budget: int,
        max_step_s: float,
        on_first: Callable[[Job, float], None],
        on_end: Callable[[Job, float], None],
    ) -> None:
        """`on_first`: a prompt is computed. `on_end`: the last token of a request that generates here."""
        self.number = number
        self.budget = budget
        self.free = steps.kv_tokens
        """Tokens of KV that nobody has reserved."""
        self.held = 0
        """Requests with reserved room."""
        self.queued = 0
        """Tokens that the waiting requests will need."""
        self.waiting: deque[TraceRequest] = deque()
        self.v = 0.0
        self.at = 0.0
        """When V had its value; later than now while a transfer takes the engine's time."""
        self.step = 0.0
        self.batch = 0
        self.busy = 0.0
        self.planned = NEVER
        """When the event comes that looks at this engine again."""
        self.version = 0
        """Counts such events: an older one is void."""
        self.slowed = 0.0
        """How much longer prompts take while the engine they go to is busy (a share)."""
        self._steps = steps
        self._max_step_s = max_step_s
        self._on_first = on_first
        self._on_end = on_end
        self._context = 0.0
        self._order = 0
        self._prompts: deque[tuple[float, Job, int]] = deque()
        """(V from which it may run, job, tokens that are computed already), in order of arrival."""
        self._chunk: list[tuple[Job, bool]] = []
        """Prompts in the running step, and whether it completes them."""
        self._until = 0.0
        """V at which that step ends."""
        self._joins: list[tuple[float, int, Job]] = []
        """Requests whose KV is here: (V at which they go on, order, job)."""
        self._ends: list[tuple[float, int, Job]] = []

    @property
    def key(self) -> tuple[int, int]:
        """Least is best: orders engines by room."""
        return self.queued - self.free, self.number

    def advance(self, now: float) -> None:
        """Bring V to `now`."""
        passed = now - self.at
        if passed > 0:
            if self.batch or self._chunk:
                gained = passed / self.step
                self.v += gained
                self._context += gained * self.batch
                self.busy += passed
            self.at = now

    def prompt(self, job: Job, now: float) -> None:
        """A prompt to compute."""
        self.advance(now)
        self._prompts.append((self._next(), job, 0))

    def receive(self, job: Job, now: float, taking_s: float) -> None:
        """All KV of a request is here: the first token is told, and the request goes on in the next step that is not
        planned yet. `taking_s`: lost by taking the KV in."""
        self.advance(now)
        if job.request.output_tokens > 1:
            self._order += 1
            heapq.heappush(self._joins, (self._next(), self._order, job))
        if self.batch or self._chunk:
            self.at += taking_s
            self.busy += taking_s
        self._on_first(job, now)

    def _next(self) -> float:
        """The first step that is not planned yet."""
        if not (self.batch or self._chunk):
            return self.v
        if (floor(self.v) + 1 - self.v) * self.step > plan_ahead_s(self.step):
            return floor(self.v) + 1
        ahead = self.batch or (self._prompts and self._prompts[0][0] <= self.v)
        ahead = ahead or any(not whole or job.generates for job, whole in self._chunk)
        return floor(self.v) + (2 if ahead else 1)

    def due(self) -> float:
        """When the batch changes next; NEVER when the engine has nothing to do."""
        if self._chunk:
            goal = self._until
        elif self.batch:
            goal = self._ends[0][0]
            if self._joins and self._joins[0][0] < goal:
                goal = self._joins[0][0]
            if self._prompts and self._prompts[0][0] < goal:
                goal = self._prompts[0][0]
        else:
            return self.at if self._joins or self._prompts else NEVER
        return self.at + (goal - self.v) * self.step

    def change(self, now: float) -> None:
        """The milestone that `due` announced: a step ended, another one begins."""
        self.advance(now)
        v = self.v = float(round(self.v))
        chunk, self._chunk = self._chunk, []
        for job, whole in chunk:
            if not whole:
                continue
            self._on_first(job, now)
            if job.generates:
                self._begin(job, v)
        while self._ends and self._ends[0][0] <= v:
            job = heapq.heappop(self._ends)[2]
            self.batch -= 1
            self._context -= job.request.input_tokens + job.request.output_tokens
            self._on_end(job, now)
        if not self.batch:
            self._context = 0.0
        while self._joins and (self._joins[0][0] <= v or not self.batch):
            self._begin(heapq.heappop(self._joins)[2], v)
        if self._prompts and not self.batch:
            v = self.v = max(v, self._prompts[0][0])
        if self._prompts and self._prompts[0][0] <= v:
            self._compose(v)
        elif self.batch:
            self.step = self._steps.decode_s(self.batch, self._context)

    def _begin(self, job: Job, v: float) -> None:
        self.batch += 1
        self._context += job.request.input_tokens + 1
        self._order += 1
        heapq.heappush(self._ends, (v + job.request.output_tokens - 1, self._order, job))

    def _fits(self, count: int, before: float) -> int:
        """How many of `count` prompt tokens, each with `before` ahead of it, the time of one step takes.

        Where nobody generates, shorter steps change nothing that is modelled here, and what was measured of whole
        prompts has their fixed costs in it.
        """
        steps, batch = self._steps, self.batch
        if not batch:
            return count
        rest = steps.decode_s(batch, self._context)
        full = steps.mixed_s(count, count * before, batch, self._context)
        seconds = prompt_seconds(self._max_step_s, rest, generating=True)
        if full - rest <= seconds:
            return count
        return min(count, max(LEAST_TOKENS, int(count * seconds / (full - rest))))

    def _compose(self, v: float) -> None:
        """The prompts of the next step, and how long it takes."""
        steps, prompts, batch = self._steps, self._prompts, self.batch
        since, job, done = prompts[0]
        left = job.request.input_tokens - job.cached - done
        room = max(1, self.budget - batch)
        room = self._fits(room, job.cached + done + min(left, room) / 2)
        whole = left // room
        if whole and not batch:
            # Steps that one prompt fills alone, as one.
            count = min(whole * room, left - 1)
            prompts[0] = (since, job, done + count)
            self._until = v + whole
            self._chunk.append((job, False))
            took = steps.prefill_s(count, count * (job.cached + done + count / 2))
            self.step = took / whole * (1 + self.slowed * (job.engine.batch > 0))
            return
        self._until = v + 1
        new, attended, slow = 0, 0.0, False
        while prompts and room and prompts[0][0] <= v:
            since, job, done = prompts.popleft()
            left = job.request.input_tokens - job.cached - done
            count = left if left < room else room
            room -= count
            new += count
            attended += count * (job.cached + done + count / 2)
            slow = slow or job.engine.batch > 0
            self._chunk.append((job, count == left))
            if count < left:
                prompts.appendleft((since, job, done + count))
        if batch:
            self.step = steps.mixed_s(new, attended, batch, self._context)
        else:
            self.step = steps.prefill_s(new, attended)
        if self.slowed and slow:
            self.step *= 1 + self.slowed
