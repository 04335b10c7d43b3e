"""Deadlines behind one timer: each is told once, in time, and never after it was dropped."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from isthmus_runtime.serving.deadlines import Deadlines


@dataclass
class _Clock:
    """The part of an event loop that `Deadlines` uses, with a clock of its own."""

    now: float = 0.0
    timers: list = field(default_factory=list)

    def time(self) -> float:
        return self.now

    def call_at(self, when, callback, *args):
        self.timers.append((when, len(self.timers), callback, args))

    def advance(self, to: float) -> None:
        while self.timers and min(self.timers)[0] <= to:
            timer = min(self.timers)
            self.timers.remove(timer)
            self.now = max(self.now, timer[0])
            timer[2](*timer[3])
        self.now = to


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("at"), st.integers(1, 50)),
            st.tuples(st.just("drop"), st.integers(0, 400)),
            st.tuples(st.just("pass"), st.integers(1, 20)),
        ),
        max_size=400,
    )
)
def test_each_is_told_once_in_time_and_never_after_it_was_dropped(steps) -> None:
    clock = _Clock()
    deadlines = Deadlines(lambda: clock)
    told: list[tuple[int, float]] = []
    made: list = []
    due: list[float] = []
    dropped: set[int] = set()
    for kind, number in steps:
        if kind == "at":
            name = len(made)
            due.append(clock.now + number)
            made.append(deadlines.at(due[name], lambda name=name: told.append((name, clock.now))))
        elif kind == "drop" and made:
            name = number % len(made)
            if due[name] > clock.now:
                dropped.add(name)
            made[name].drop()
        elif kind == "pass":
            clock.advance(clock.now + number)
        passed = {name for name in range(len(made)) if due[name] <= clock.now and name not in dropped}
        assert sorted(name for name, _ in told) == sorted(passed)
    assert all(at == due[name] for name, at in told)


def test_dropped_ones_do_not_pile_up_and_there_is_one_timer() -> None:
    clock = _Clock()
    deadlines = Deadlines(lambda: clock)
    for number in range(10_000):
        clock.now = number / 100
        deadlines.at(clock.now + 600, lambda: pytest.fail("it was dropped")).drop()
    assert len(deadlines) < 200
    assert len(clock.timers) == 1
    clock.advance(2000)
    assert len(deadlines) == 0


def test_a_block_that_takes_longer_gets_a_timeout_error() -> None:
    async def scenario() -> None:
        deadlines = Deadlines()
        with pytest.raises(TimeoutError), deadlines.within(0.01):
            await asyncio.Event().wait()
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()
        with deadlines.within(60):
            await asyncio.sleep(0)

    uvloop.run(scenario())


def test_a_cancellation_by_somebody_else_is_theirs_also_at_the_deadline() -> None:
    async def scenario() -> None:
        clock = SimpleNamespace(now=0.0)
        loop = asyncio.get_running_loop()
        fired: list = []
        fake = SimpleNamespace(time=lambda: clock.now, call_at=lambda when, call, *args: fired.append((call, args)))
        deadlines = Deadlines(lambda: fake)

        async def work() -> None:
            with deadlines.within(5):
                await loop.create_future()

        for both in (False, True):
            clock.now = 0.0
            fired.clear()
            task = asyncio.create_task(work())
            await asyncio.sleep(0)
            task.cancel()
            if both:
                clock.now = 5.0
                call, args = fired[0]
                call(*args)
            with pytest.raises(asyncio.CancelledError):
                await task
            clock.now = 5.0
            for call, args in fired[:]:
                call(*args)

    asyncio.run(scenario())
