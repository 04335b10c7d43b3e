"""What works on threads may take together, in turns of clients."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from isthmus_runtime.errors import Overloaded
from isthmus_runtime.sharing.reserve import Reserve, SetAside
from isthmus_runtime.sharing.threads_in_turns import ThreadsInTurns, _Task
from isthmus_runtime.threads import processors


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Asked:
    """Of a reserve of a hundred bytes, and what was given of it, in order."""

    def __init__(self, waiting: int = 8, works: ThreadsInTurns | None = None) -> None:
        self.reserve = Reserve(lambda: 100, waiting, "wait", works)
        self.given: dict[str, SetAside] = {}

    async def ask(self, *names: str) -> list[asyncio.Task[None]]:
        """Each is a client's letter and a size."""

        async def one(name: str) -> None:
            self.given[name] = await self.reserve.take(name[0], int(name[1:]))

        tasks = [asyncio.create_task(one(name)) for name in names]
        await settled()
        return tasks

    async def back(self, name: str) -> list[str]:
        """Give one back; who has something then."""
        self.given.pop(name).give_back()
        await settled()
        return list(self.given)


def test_those_who_do_not_fit_wait_and_a_larger_one_is_served_alone() -> None:
    async def main() -> None:
        asked = Asked()
        await asked.ask("a60", "b50", "c30", "d300")
        assert list(asked.given) == ["a60"], "nobody overtakes the one who is next"
        assert await asked.back("a60") == ["b50", "c30"]
        assert await asked.back("b50") == ["c30"], "the next one fits with nobody else"
        await asked.ask("e1")
        assert await asked.back("c30") == ["d300"]
        assert await asked.back("d300") == ["e1"]
        assert await asked.back("e1") == [] and asked.reserve.used == 0

    asyncio.run(asyncio.wait_for(main(), 20))


def test_one_client_has_half_and_what_it_waits_for_holds_nobody_up() -> None:
    """Four bodies of one client, and more of it behind them, had all for as long as they waited for a thread."""

    async def main() -> None:
        asked = Asked(waiting=3)
        await asked.ask("a25", "a24", "a2", "a3")
        assert list(asked.given) == ["a25", "a24"], "one client has half"
        await asked.ask("b50")
        assert list(asked.given) == ["a25", "a24", "b50"], "there is room for another"
        await asked.ask("b51")
        assert await asked.back("a24") == ["a25", "b50", "a2", "a3"]
        assert await asked.back("b50") == ["a25", "a2", "a3", "b51"], "one piece is of any size"
        tasks = await asked.ask("a21", "a4", "a5", "a6", "a7", "c1")
        assert [task.done() and task.exception() is not None for task in tasks] == [False] * 4 + [True, False]
        assert isinstance(tasks[4].exception(), Overloaded) and list(asked.given)[-1] == "c1"

    asyncio.run(asyncio.wait_for(main(), 20))


def test_who_waits_and_leaves_holds_nobody_up() -> None:
    async def main() -> None:
        asked = Asked()
        await asked.ask("a60")
        waits, _ = await asked.ask("b90", "c40")
        assert list(asked.given) == ["a60"]
        waits.cancel()
        await settled()
        assert list(asked.given) == ["a60", "c40"]
        (waits,) = await asked.ask("b90")
        for name in ("a60", "c40"):  # it leaves as it is served
            asked.given.pop(name).give_back()
        waits.cancel()
        await settled()
        assert waits.cancelled() and asked.reserve.used == 0
        (part,) = [await asked.reserve.take("b", 10)]
        part.give_back()
        with pytest.raises(AssertionError):
            part.give_back()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_work_ends_where_another_client_waits_for_what_it_has() -> None:
    """Of what it waits for alone: not one that has something else."""

    async def main() -> None:
        threads = ThreadsInTurns(4, "test", 8, "wait")
        asked, other = Asked(works=threads), Reserve(lambda: 1, 8, "wait")
        tasks = {}
        for who, worked_s, of in (("a", 20.0, other), ("b", 11.0, asked.reserve), ("c", 12.0, asked.reserve)):
            tasks[who] = _Task(who, None)
            tasks[who].worked_s = worked_s
            threads._holding[tasks[who]] = await of.take(who, 40)
        await asked.ask("b10")
        assert not any(task.ending for task in tasks.values()), "it fits"
        await asked.ask("b30")
        assert not any(task.ending for task in tasks.values()), "it waits for its own"
        await asked.ask("d20")
        assert [who for who, task in tasks.items() if task.ending] == ["c"]

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize(
    ("text", "most"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 1 << 20), ("", 1 << 20)]
)
def test_processors_are_those_that_the_control_group_s_time_is_worth(tmp_path: Path, text: str, most: int) -> None:
    (tmp_path / "cpu.max").write_text(text)
    usual = processors(tmp_path / "none")
    assert processors(tmp_path) == min(most, usual) >= 1
