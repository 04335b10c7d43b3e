"""Work that takes too long is left behind: its service is told so, others go on, and the event loop never waits."""

import asyncio
import threading

import pytest

from isthmus_operator.errors import OverBudget
from isthmus_operator.shell.budget import Workbench


def test_work_returns_and_raises_what_it_does() -> None:
    async def main() -> None:
        bench = Workbench()
        assert await bench.run("a", lambda: threading.current_thread() is threading.main_thread()) is False
        with pytest.raises(ZeroDivisionError):
            await bench.run("a", lambda: 1 // 0)
        with pytest.raises(TimeoutError):
            await bench.run("a", _times_out)

    asyncio.run(main())


def _times_out() -> None:
    raise TimeoutError


def test_a_service_over_its_budget_is_refused_until_it_ends_and_others_go_on() -> None:
    async def main() -> None:
        bench, release = Workbench(0.05), threading.Event()
        with pytest.raises(OverBudget, match=r"takes longer than 0\.05 s to work out"):
            await bench.run("slow", lambda: release.wait(60))
        (slow,) = [one for one in threading.enumerate() if one.name == "workbench"]
        with pytest.raises(OverBudget, match="still at it"):
            await bench.run("slow", lambda: True)
        patient = Workbench(60)
        patient._overdue = bench._overdue
        assert await patient.run("other", lambda: 5) == 5
        assert patient._overdue == {"slow"}
        release.set()
        await asyncio.to_thread(slow.join, 60)
        # What the thread has reported is next in the loop's queue.
        await asyncio.sleep(0)
        assert await patient.run("slow", lambda: 6) == 6

    asyncio.run(main())


def test_whoever_waits_may_be_cancelled() -> None:
    async def main() -> None:
        bench, begun, release = Workbench(60), threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            release.wait(60)
            raise ValueError("nobody hears this")

        waiting = asyncio.create_task(bench.run("a", work))
        assert await asyncio.to_thread(begun.wait, 60)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        # The next one has its turn at once.
        assert await bench.run("b", lambda: 1) == 1
        release.set()

    asyncio.run(main())
