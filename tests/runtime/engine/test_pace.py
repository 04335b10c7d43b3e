"""Steps bounded by time: what a stream, a lone prompt, an arrival and a cancellation wait for. On a fake clock."""

from __future__ import annotations

from itertools import pairwise

import pytest
from engine_world import request
from timed_engine import Cost, TimedEngine

from isthmus_runtime.engine.pace import AHEAD_S, AHEAD_SHARE, ALONE
from isthmus_runtime.errors import DeadlineExceeded, EngineFailed
from isthmus_runtime.executor.fake import expected_tokens
from isthmus_runtime.request import FinishReason

BOUND_S = 0.2
LONG = [7 + i % 900 for i in range(2000)]


def warm(engine: TimedEngine) -> None:
    """A first request of everything, so that step times are known."""
    engine.loop.generate(request("warm", [3] * 1500, 20))
    engine.run()
    engine.executor.steps.clear()


def gaps(engine: TimedEngine, sid: str) -> list[float]:
    times = engine.times(sid)
    return [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.parametrize("known", [True, False])
def test_a_long_prompt_does_not_stop_a_stream(known: bool) -> None:
    engine = TimedEngine(max_step_s=BOUND_S)
    if known:
        warm(engine)
    engine.loop.generate(request("stream", [1, 2, 3], 200))
    engine.run(engine.now + 0.3)
    engine.loop.generate(request("long", LONG, 5))
    engine.run()
    assert max(gaps(engine, "stream")) < 1.25 * BOUND_S
    for sid, prompt, count in (("stream", [1, 2, 3], 200), ("long", LONG, 5)):
        tokens = [t for _, who, chunk in engine.replies if who == sid for t in chunk.token_ids]
        assert tokens == expected_tokens(prompt, request("x", [1], 1).sampling, count)
    engine.scheduler.check()


def test_the_bound_is_the_setting() -> None:
    worst = []
    for bound in (0.1, 0.4):
        engine = TimedEngine(max_step_s=bound)
        warm(engine)
        engine.loop.generate(request("stream", [1, 2, 3], 100))
        engine.run(engine.now + 0.3)
        engine.loop.generate(request("long", LONG, 1))
        engine.run()
        worst.append(max(gaps(engine, "stream")) / bound)
    assert all(0.6 < share < 1.25 for share in worst), worst


def test_prompts_alone_lose_no_throughput() -> None:
    """Nobody generates: the steps are as long as keeps their fixed cost small."""
    engine = TimedEngine(max_step_s=BOUND_S)
    warm(engine)
    began = engine.now
    for number in range(8):
        engine.loop.generate(request(f"p{number}", [100 + number, *LONG], 1))
    engine.run()
    cost = Cost()
    computed = sum(cost(plan) - cost.step for _, _, plan in engine.executor.steps)
    assert engine.now - began < 1.06 * (computed + cost.step)
    longest = max(ended - start for start, ended, _ in engine.executor.steps)
    assert BOUND_S < longest < 1.25 * ALONE * BOUND_S


def test_where_decoding_alone_takes_longer_than_the_bound_prompts_get_as_much_again() -> None:
    slow = Cost(step=0.7, row=0.01, token=0.02, pair=1e-6)
    engine = TimedEngine(slow, max_step_s=BOUND_S)
    warm(engine)
    engine.loop.generate(request("stream", [1, 2, 3], 60))
    engine.run(engine.now + 3.0)
    engine.loop.generate(request("long", LONG[:1000], 1))
    engine.run()
    beside = [ended - start for start, ended, plan in engine.executor.steps if plan.num_tokens > 16]
    assert 1.1 * slow.step < sum(beside) / len(beside) < 2.5 * slow.step


def test_who_arrives_during_a_step_is_in_the_next_one() -> None:
    engine = TimedEngine(max_step_s=BOUND_S)
    warm(engine)
    engine.loop.generate(request("first", LONG[:200], 10))
    engine.run(engine.now + 0.1)
    assert engine.scheduler.in_flight == 1, "the next step is planned no earlier than it must be"
    engine.loop.generate(request("second", [9] * 8, 1))
    engine.run()
    (at,) = engine.times("second")
    _, _, plan = engine.executor.steps[1]
    assert [start.request_id for start in plan.starts] == ["second"]
    assert at == engine.executor.steps[1][1]


@pytest.mark.parametrize("after_s", [0.05, 0.2, 0.39])
def test_cancelled_prompts_leave_the_steps_that_have_not_begun(after_s: float) -> None:
    engine = TimedEngine(max_step_s=BOUND_S)
    warm(engine)
    for number in range(40):
        engine.loop.generate(request(f"p{number}", [50 + number] * 900, 10))
    engine.run(engine.now + after_s)
    cancelled = engine.now
    for number in range(40):
        engine.loop.abort(f"p{number}", "", "the client left", answer=False)
    engine.loop.generate(request("next", [5], 1))
    engine.run()
    (answered,) = engine.times("next")
    bound = ALONE * BOUND_S
    assert answered - cancelled < 1.25 * bound + AHEAD_S + AHEAD_SHARE * bound + 0.1
    later = [plan for began, _, plan in engine.executor.steps if began > cancelled + AHEAD_S + AHEAD_SHARE * bound]
    assert sum(plan.num_tokens for plan in later) <= 1, "cancelled prompts were computed"
    engine.scheduler.check()


@pytest.mark.parametrize("left", [0, 1])
def test_cancelled_prompts_leave_a_planned_step_that_has_not_begun(left: int) -> None:
    """The running step takes longer than was expected, so the next one is planned already."""
    slower = 1.0
    cost = Cost()
    engine = TimedEngine(lambda plan: slower * cost(plan), max_step_s=BOUND_S)
    warm(engine)
    if left:
        engine.loop.generate(request("stream", [1, 2, 3], 40))
        engine.run(engine.now + 0.3)
    for number in range(4):
        engine.loop.generate(request(f"p{number}", [50 + number] * 900, 10))
    engine.run(engine.now + 0.4)
    slower = 20.0
    engine.run(engine.now + 1.0)
    assert engine.scheduler.in_flight == 2
    for number in range(4):
        engine.loop.abort(f"p{number}", "", "the client left", answer=False)
    engine.loop.generate(request("next", [5, 6], 3))
    engine.run(engine.now + 0.01)
    slower = 1.0
    ran = len(engine.executor.steps)
    engine.run()
    running, *later = [plan for _, _, plan in engine.executor.steps[ran:]]
    assert running.num_tokens > 16
    assert max(plan.num_tokens for plan in later) <= 2 + left, "cancelled prompts were computed"
    for sid, prompt, count in [("next", [5, 6], 3), *([("stream", [1, 2, 3], 40)] if left else [])]:
        tokens = [t for _, who, chunk in engine.replies if who == sid for t in chunk.token_ids]
        assert tokens == expected_tokens(prompt, request("x", [1], 1).sampling, count)
    engine.scheduler.check()


def test_a_request_ends_at_its_deadline_though_a_step_hangs() -> None:
    engine = TimedEngine(lambda plan: 1000.0, step_timeout_s=100.0)
    req = request("r", [1, 2, 3], 5)
    engine.loop.generate(type(req)(**{f: getattr(req, f) for f in req.__slots__} | {"timeout_s": 2.0}))
    engine.loop.generate(request("patient", [4, 5], 5))
    engine.run(3.0)
    assert isinstance(engine.ending("r").error, DeadlineExceeded)
    assert [sid for _, sid, _ in engine.replies] == ["r"]


def test_a_step_that_never_ends_breaks_the_engine_and_ends_every_request() -> None:
    engine = TimedEngine(lambda plan: 1000.0, step_timeout_s=100.0)
    engine.loop.generate(request("r", [1, 2, 3], 5))
    engine.run(99.0)
    assert not engine.replies
    with pytest.raises(TimeoutError, match=r"a step has not ended for 100 s \(--no-progress-timeout\)") as caught:
        engine.run(101.0)
    engine.loop._break(str(caught.value))  # what the thread does with what a turn raises
    assert engine.ending("r").finish_reason is FinishReason.ERROR
    assert isinstance(engine.ending("r").error, EngineFailed)


def test_the_time_out_counts_from_the_step_and_not_from_the_last_work() -> None:
    engine = TimedEngine(step_timeout_s=100.0)
    warm(engine)
    engine.run(engine.now + 1000.0)
    engine.loop.generate(request("r", [1, 2, 3], 5))
    engine.run()
    assert engine.ending("r").finish_reason is FinishReason.LENGTH
