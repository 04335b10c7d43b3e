"""How much of the next step prompts may take, and when it is planned: steps are bounded by time (ADR 22). Pure.

- While a row generates, its next token waits for the step: prompts get what `max_step_s` leaves beside the rest of the
  step, and no less than that rest (where decoding alone takes as long, half of each step goes to prompts).
- While none does, only arrivals and cancellations wait: `ALONE` times as long, and no less than `ALONE_FIXED` times
  the step's fixed cost, so that short steps cost prompts no throughput.
- Each step with prompts computes at least `LEAST_TOKENS` of them, so they always come to an end, and no prompt gets
  fewer unless they are its last: no slivers.

A step is planned `AHEAD` before the one that runs is expected to end: early enough to be ready, late enough that
whoever arrived or was cancelled meanwhile is in it or out of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ..interfaces.steps import StepPlan
from .sequence import Sequence
from .step_time import StepSize, StepTimes, attended

ALONE = 2.0
ALONE_FIXED = 8.0
LEAST_TOKENS = 16
GRAIN = 4
"""What chunks that time limits are a multiple of. Where a step has room for 44 tokens, one of 32 in their place takes a
quarter more steps, each with what a step costs whatever is in it."""
AHEAD_S, AHEAD_SHARE = 0.010, 0.1
"""A step is planned so long, and this share of its predecessor's time, before that is expected to end."""


def prompt_seconds(max_step_s: float, rest_s: float, *, generating: bool) -> float:
    """Seconds of a step that prompts may take, when everything else in it takes `rest_s`."""
    if generating:
        return max(max_step_s - rest_s, rest_s)
    return max(ALONE * max_step_s - rest_s, ALONE_FIXED * rest_s)


def plan_ahead_s(step_s: float) -> float:
    """How long before the end of a step that takes `step_s` the next one is planned; at its begin if it is short."""
    ahead = AHEAD_S + AHEAD_SHARE * step_s
    return ahead if step_s > 2 * ahead else step_s


def waits_for_token(seq: Sequence) -> bool:
    """Whether the running request's next step draws a token after its first: a stream that a long step would stop."""
    known = seq.known
    return seq.prompt_len < known < seq.end_len and known - seq.scheduled <= 1


class PromptBudget:
    """What prompts may still take of the step that is being planned."""

    __slots__ = ("_seconds", "_times", "_tokens", "_untouched", "spent")

    def __init__(self, times: StepTimes, seconds: float) -> None:
        self._times = times
        self._seconds = seconds
        self._tokens = times.most_tokens
        self._untouched = True
        self.spent = False
        """Whether a prompt got less than it wanted: there is nothing for others."""

    def take(self, start: int, wanted: int) -> int:
        """How many of `wanted` tokens from position `start` on are computed in this step; they are taken off."""
        count = min(wanted, self._tokens, self._times.tokens_in(self._seconds, start))
        if count < wanted:
            count -= count % GRAIN
            if count < LEAST_TOKENS:
                count = min(wanted, LEAST_TOKENS) if self._untouched else 0
            self.spent = count < wanted
        self._untouched = False
        self._tokens -= count
        self._seconds -= self._times.prompt_seconds(start, count)
        return count


class Pace:
    """Measures steps and bounds the next one."""

    def __init__(self, max_step_s: float) -> None:
        self.times = StepTimes()
        self._max_step_s = max_step_s
        self._in_flight: deque[tuple[StepSize, float]] = deque()
        """What was submitted and has not ended, and since when."""
        self._ended_s = float("-inf")
        """When the newest step that has ended did."""

    def prompts(self, running: Iterable[Sequence]) -> PromptBudget:
        """What prompts may take of a step beside the `running` requests."""
        rows, generating = 0, False
        for seq in running:
            rows += 1
            generating = generating or waits_for_token(seq)
        rest = self.times.seconds(StepSize(rows, 0, 0.0))
        return PromptBudget(self.times, prompt_seconds(self._max_step_s, rest, generating=generating))

    def submitted(self, plan: StepPlan, now: float) -> None:
        """A step was planned and goes to the executor."""
        rows = len(plan.chunks)
        size = StepSize(rows, 0, 0.0)
        if plan.num_tokens > rows:
            # A draft costs what a token of a prompt does; the token before drafts is the row's.
            prompts = [(start, count - (draws > 1)) for _, start, count, draws, _ in plan.chunks if count > 1]
            size = StepSize(rows, sum(n for _, n in prompts), sum(attended(start, n) for start, n in prompts))
        self._in_flight.append((size, now))

    def withdrawn(self) -> None:
        """The newest step was taken back."""
        self._in_flight.pop()

    def completed(self, now: float) -> None:
        """The oldest step has ended. It began when it was submitted or, later, when the one before it ended."""
        size, since = self._in_flight.popleft()
        self.times.learn(size, now - max(since, self._ended_s))
        self._ended_s = now

    def plan_at(self) -> float:
        """When the step after the newest one should be planned; in the past where waiting buys nothing."""
        if not self._in_flight:
            return self._ended_s
        size, since = self._in_flight[0]
        expected = self.times.seconds(size)
        return max(since, self._ended_s) + expected - plan_ahead_s(expected)
