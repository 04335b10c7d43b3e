"""What works on threads may take together, in turns of clients."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from isthmus_runtime.errors import Overloaded
from isthmus_runtime.sharing.reserve import Reserve
from isthmus_runtime.threads import processors


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_those_who_do_not_fit_wait_and_a_larger_one_is_served_alone() -> None:
    async def main() -> None:
        reserve, served = Reserve(lambda: 100, 3, "wait"), list[str]()

        async def ask(who: str, size: int) -> None:
            await reserve.take(who, size)
            served.append(f"{who}{size}")

        asked = [asyncio.create_task(ask(who, size)) for who, size in (("a", 60), ("a", 60), ("a", 30), ("b", 300))]
        await settled()
        assert served == ["a60"], "nobody overtakes the one who is next"
        with pytest.raises(Overloaded):
            for _ in range(2):
                asked.append(asyncio.create_task(ask("a", 1)))
                await settled()
                await reserve.take("a", 1)
        reserve.give_back(60)
        await settled()
        assert served[1:] == ["a60", "a30"]
        reserve.give_back(60)
        await settled()
        assert served[3:] == [], "it fits with nobody else"
        reserve.give_back(30)
        await settled()
        assert served[3:] == ["b300"], "clients in turn"
        reserve.give_back(300)
        await settled()
        assert served[4:] == ["a1"] and reserve.used == 1
        for task in asked:
            task.cancel()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_who_waits_and_leaves_holds_nobody_up() -> None:
    async def main() -> None:
        reserve = Reserve(lambda: 10, 5, "wait")
        await reserve.take("a", 10)
        waits = asyncio.create_task(reserve.take("b", 10))
        behind = asyncio.create_task(reserve.take("c", 10))
        await settled()
        waits.cancel()
        await settled()
        reserve.give_back(10)
        await behind
        assert reserve.used == 10
        with pytest.raises(AssertionError):
            reserve.give_back(11)

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize(
    ("text", "most"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 1 << 20), ("", 1 << 20)]
)
def test_processors_are_those_that_the_control_group_s_time_is_worth(tmp_path: Path, text: str, most: int) -> None:
    (tmp_path / "cpu.max").write_text(text)
    usual = processors(tmp_path / "none")
    assert processors(tmp_path) == min(most, usual) >= 1
