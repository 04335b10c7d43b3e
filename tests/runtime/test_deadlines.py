"""Many deadlines on one timer: the same outcomes as with asyncio's own."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_runtime import deadlines
from isthmus_runtime.deadlines import Deadlines


class FakeLoop(asyncio.SelectorEventLoop):
    """A loop whose clock we turn."""

    now = 0.0

    def time(self):
        return self.now

    def pending(self):
        return [timer for timer in self._scheduled if not timer.cancelled()]

    async def turn(self, to):
        """Let the clock run to `to`, stopping at each timer."""
        while (due := min((t.when() for t in self.pending()), default=to + 1)) <= to:
            self.now = max(self.now, due)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        self.now = to


def run(work):
    with asyncio.Runner(loop_factory=FakeLoop) as runner:
        return runner.run(work)


@settings(max_examples=50, deadline=None)
@given(entries=st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=20), end=st.floats(0, 6))
def test_each_fires_once_in_time_unless_cancelled(entries, end):
    async def main():
        loop = asyncio.get_running_loop()
        many, fired = Deadlines(), []
        made = [many.at(when, lambda i=i: fired.append((i, loop.time()))) for i, (when, _) in enumerate(entries)]
        for deadline, (_, cancelled) in zip(made, entries, strict=True):
            if cancelled:
                deadline.cancel()
        assert len(loop.pending()) <= 1
        await loop.turn(end)
        tick = deadlines.TICK_S
        times = dict(fired)
        assert len(times) == len(fired)
        for i, (when, cancelled) in enumerate(entries):
            if cancelled or when > end:
                assert i not in times
            elif when < end - 2 * tick:
                assert when <= times[i] <= when + 2 * tick
        for deadline in made:
            deadline.cancel()  # also after it has fired
        await loop.turn(10)

    run(main())


def test_a_callback_may_set_and_cancel_others():
    async def main():
        loop = asyncio.get_running_loop()
        many, fired = Deadlines(), []
        other = many.at(1.01, lambda: fired.append("other"))

        def first():
            fired.append("first")
            other.cancel()
            many.at(loop.time(), lambda: fired.append("second"))

        many.at(1.0, first)
        await loop.turn(2)
        assert fired in (["first", "second"], ["other", "first", "second"])  # both were due in one tick
        assert not loop.pending()

    run(main())


def test_a_broken_callback_does_not_stop_the_clock():
    async def main():
        loop = asyncio.get_running_loop()
        many, fired, seen = Deadlines(), [], []
        loop.set_exception_handler(lambda _, context: seen.append(context["exception"]))
        many.at(1.0, lambda: 1 / 0)
        many.at(2.0, lambda: fired.append(2))
        await loop.turn(3)
        assert fired == [2] and isinstance(seen[0], ZeroDivisionError)

    run(main())


def test_limit_ends_its_block():
    async def main():
        loop = asyncio.get_running_loop()
        many = Deadlines()

        async def work():
            with pytest.raises(TimeoutError), many.limit(1.0):
                await asyncio.Event().wait()
            assert asyncio.current_task().cancelling() == 0
            with many.limit(1.0):
                return "done"

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        await loop.turn(2)
        assert await task == "done"
        await loop.turn(9)  # the second limit is gone

    run(main())


@pytest.mark.parametrize("expired", [False, True])
def test_a_cancellation_from_elsewhere_is_none_of_its_own(expired):
    async def main():
        loop = asyncio.get_running_loop()
        many = Deadlines()

        async def work():
            with many.limit(1.0):
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        if expired:
            loop.now = 2.0  # both before the task runs
            many._tick()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())


def test_an_error_of_the_block_wins():
    async def main():
        many = Deadlines()
        with pytest.raises(KeyError), many.limit(1.0):
            raise KeyError("x")

    run(main())
