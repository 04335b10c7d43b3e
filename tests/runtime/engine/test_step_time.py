"""What is learnt of step times, whatever the device: properties over speeds, shapes, noise and outliers."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from isthmus_runtime.engine.pace import GRAIN, LEAST_TOKENS, PromptBudget, prompt_seconds
from isthmus_runtime.engine.step_time import FIRST_TOKENS, GROWTH, StepSize, StepTimes, attended

PROMPT = 2000


class Device:
    """Its steps take what `StepTimes` supposes, with costs that it does not know."""

    def __init__(self, step: float, row: float, token: float, pair: float, *, noise: float = 0.0, seed: int = 0):
        self.costs = (step, row, token, pair)
        self._noise, self._random = noise, Random(seed)

    def __call__(self, size: StepSize) -> float:
        step, row, token, pair = self.costs
        exact = step + row * size.rows + token * size.tokens + pair * size.attended
        return exact * self._random.uniform(1 - self._noise, 1 + self._noise)


DEVICES = st.builds(
    # The speeds of a step lie apart by up to eight decades; its parts, by what models and devices differ in.
    lambda scale, row, token, context: (scale, scale * row, scale * token, scale * token / context),
    st.sampled_from((1e-6, 1e-3, 1e-2, 1.0, 100.0)),
    st.floats(0.001, 0.5),
    st.floats(0.001, 0.5),
    st.floats(1000.0, 50_000.0),
)


def decode(times: StepTimes, device: Device, rows: int, steps: int) -> None:
    for _ in range(steps):
        size = StepSize(rows, 0, 0.0)
        times.learn(size, device(size))


def prefill(times: StepTimes, device: Device, rows: int, bound: float, length: int) -> list[tuple[int, float]]:
    """A prompt of `length` beside `rows` that generate: (tokens, seconds) of each of its steps."""
    at, steps = 0, []
    while at < length:
        rest = times.seconds(StepSize(rows + 1, 0, 0.0))
        count = PromptBudget(times, prompt_seconds(bound, rest, generating=True)).take(at, length - at)
        assert count > 0, "a prompt must go on"
        size = StepSize(rows + 1, count, attended(at, count))
        took = device(size)
        times.learn(size, took)
        steps.append((count, took))
        at += count
    return steps


@given(costs=DEVICES, rows=st.integers(1, 64), part=st.floats(4.0, 40.0), seed=st.integers(0, 1 << 32))
def test_steps_stay_near_the_bound_on_any_device(
    costs: tuple[float, float, float, float], rows: int, part: float, seed: int
) -> None:
    device, times = Device(*costs, noise=0.1, seed=seed), StepTimes()
    alone = Device(*costs)(StepSize(rows + 1, 0, 0.0))
    # The bound is several times what decoding takes, and room for more than the least chunk at the prompt's end.
    least = costs[2] * LEAST_TOKENS + costs[3] * attended(PROMPT, LEAST_TOKENS)
    bound = part * max(alone, least)
    decode(times, device, rows, 20)
    largest = 0
    for prompt in range(4):
        steps = prefill(times, device, rows, bound, PROMPT)
        for count, took in steps:
            # A chunk larger than any before is at most double the largest, whatever is known of the device by then.
            most = 2.0 if prompt == 0 or count > largest else 1.75
            assert took < most * bound, f"prompt {prompt}: {count} tokens took {took / bound:.2f} bounds, {steps}"
            largest = max(largest, count)
        full = [took for count, took in steps[:-1] if count > LEAST_TOKENS]
        if prompt and len(full) > 3:
            assert sum(full) / len(full) > 0.5 * bound, f"prompt {prompt} is slowed for nothing: {steps}"
        decode(times, device, rows, 20)


@given(costs=DEVICES)
def test_chunks_shrink_as_attention_grows(costs: tuple[float, float, float, float]) -> None:
    device, times = Device(*costs), StepTimes()
    bound = 20 * device(StepSize(1, LEAST_TOKENS, attended(PROMPT, LEAST_TOKENS)))
    decode(times, device, 1, 20)
    for _ in range(5):
        steps = prefill(times, device, 1, bound, PROMPT)
    early, late = steps[0][0], min(count for count, _ in steps[:-1]) if len(steps) > 1 else steps[0][0]
    assert late <= early
    assert max(took for _, took in steps) < 1.25 * bound


@given(costs=DEVICES, factor=st.floats(3.0, 1e6), part=st.floats(8.0, 40.0))
def test_one_slow_step_does_not_stop_prompts(
    costs: tuple[float, float, float, float], factor: float, part: float
) -> None:
    device, times = Device(*costs), StepTimes()
    bound = part * device(StepSize(2, LEAST_TOKENS, 0.0))
    decode(times, device, 1, 20)
    for _ in range(4):
        prefill(times, device, 1, bound, PROMPT)
    before = times.tokens_in(bound, 0)
    count = min(before, times.most_tokens // GROWTH)
    size = StepSize(2, count, attended(0, count))
    times.learn(size, factor * device(size))
    assert times.tokens_in(bound, 0) >= before // 4
    for _ in range(20):
        times.learn(size, device(size))
    assert times.tokens_in(bound, 0) >= 0.7 * before


@given(costs=DEVICES, faster=st.sampled_from((1e-3, 0.1, 0.5, 2.0, 10.0, 1000.0)))
def test_another_speed_is_learnt(costs: tuple[float, float, float, float], faster: float) -> None:
    times, size = StepTimes(), StepSize(4, 100, attended(500, 100))
    old, new = Device(*costs), Device(*(faster * c for c in costs))
    for device in (old, new):
        for _ in range(60):
            times.learn(size, device(size))
        assert abs(times.seconds(size) / device(size) - 1) < 0.05


def test_a_long_prompt_alone_is_one_step_where_it_takes_half_of_what_it_may() -> None:
    # An 8B model on one H200 (runtime/bench/LOG.md): 8,192 tokens take 0.2 s of the 0.4 s that nobody waits for.
    times, device = StepTimes(), Device(4.1e-3, 2.7e-5, 2.13e-5, 5.5e-10, noise=0.05, seed=1)

    def alone(count: int, length: int) -> list[int]:
        steps = []
        for _ in range(count):
            at = 0
            while at < length:
                rest = times.seconds(StepSize(1, 0, 0.0))
                tokens = PromptBudget(times, prompt_seconds(0.2, rest, generating=False)).take(at, length - at)
                size = StepSize(1, tokens, attended(at, tokens))
                times.learn(size, device(size))
                steps.append(tokens)
                at += tokens
        return steps

    for count, length in ((8, 128), (2, 4096), (5, 1024)):
        alone(count, length)
        decode(times, device, 1, 50)
    assert alone(3, 8192) == [8192, 8192, 8192]


def test_a_cold_start_is_careful_and_short() -> None:
    times, sizes = StepTimes(), []
    device = Device(0.01, 1e-4, 1e-5, 1e-9)
    for _ in range(8):
        count = PromptBudget(times, prompt_seconds(1.0, 0.01, generating=False)).take(0, 8192)
        sizes.append(count)
        size = StepSize(1, count, attended(0, count))
        times.learn(size, device(size))
    assert sizes[0] == FIRST_TOKENS
    assert all(later <= GROWTH * earlier for earlier, later in pairwise(sizes))
    assert sizes[-1] == 8192


@given(
    seconds=st.floats(0.0, 1e3),
    start=st.integers(0, 1 << 20),
    history=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 9000), st.floats(0.0, 1e3)), max_size=20),
)
def test_what_fits_adds_no_more_than_the_time_given(
    seconds: float, start: int, history: list[tuple[int, int, float]]
) -> None:
    times = StepTimes()
    for rows, tokens, took in history:
        times.learn(StepSize(rows, tokens, attended(0, tokens)), took)
        assert times.seconds(StepSize(rows, tokens, attended(0, tokens))) >= 0
    count = times.tokens_in(seconds, start)
    assert count >= 0
    assert times.prompt_seconds(start, count) <= seconds * (1 + 1e-9)


def test_a_step_is_filled_with_what_there_is_time_for() -> None:
    times = StepTimes()
    times.learn(StepSize(1, 512, attended(0, 512)), 0.5)
    for tokens in range(LEAST_TOKENS, 100):
        taken = PromptBudget(times, times.prompt_seconds(0, tokens) * (1 + 1e-9)).take(0, 5000)
        assert tokens - GRAIN < taken <= tokens


@given(wanted=st.lists(st.integers(2, 5000), min_size=1, max_size=8), seconds=st.floats(0.0, 10.0))
def test_prompts_share_one_budget_and_the_first_always_goes_on(wanted: list[int], seconds: float) -> None:
    times = StepTimes()
    times.learn(StepSize(1, 512, attended(0, 512)), 0.5)
    budget = PromptBudget(times, seconds)
    taken = [budget.take(0, want) for want in wanted]
    assert taken[0] >= min(wanted[0], LEAST_TOKENS)
    for count, want in zip(taken, wanted, strict=True):
        assert count in (0, want) or (count >= LEAST_TOKENS and (count % GRAIN == 0 or count == LEAST_TOKENS))
    least = times.prompt_seconds(0, LEAST_TOKENS)
    assert sum(times.prompt_seconds(0, count) for count in taken) <= max(seconds, least) * (1 + 1e-9)
    assert budget.spent == (taken != wanted)
