"""Turns at judging reviews: by address and namespace, and who gives way."""

import asyncio

from isthmus_operator.shell import turns


def test_of_many_namespaces_with_a_small_review_each_none_gives_way() -> None:
    """As whoever applies a hundred services at once has them: nobody has more than another."""

    async def main() -> None:
        taken = turns.Turns()

        async def judged(namespace: str, size: int) -> str:
            try:
                async with taken.turn("a", namespace, size):
                    return ""
            except turns.Busy:
                return namespace

        async with taken.turn("a", "first", 100):
            answers = [asyncio.create_task(judged(f"n{i}", 100)) for i in range(100)]
            answers += [asyncio.create_task(judged("large", turns.LEAST_BYTES)) for _ in range(2)]
            await asyncio.sleep(0)  # all of them wait, or have left
        assert {*await asyncio.gather(*answers)} == {"", "large"}

    asyncio.run(asyncio.wait_for(main(), 60))


def test_turns_go_round_by_address_and_by_namespace() -> None:
    async def main() -> None:
        taken, order = turns.Turns(), []
        held = asyncio.Event()

        async def one(address: str, namespace: str, number: int) -> None:
            async with taken.turn(address, namespace, 1):
                order.append((address, namespace, number))
                await held.wait()

        first = asyncio.create_task(one("a", "x", 0))
        await asyncio.sleep(0)
        several = [one("a", "x", number) for number in range(1, 4)]
        several += [one("a", "y", number) for number in range(2)]
        several += [one("b", "z", number) for number in range(2)]
        waiting = [asyncio.create_task(work) for work in several]
        await asyncio.sleep(0)
        left = waiting.pop()  # of b/z, while it waits
        left.cancel()
        held.set()
        await asyncio.gather(first, *waiting)
        assert [(address, namespace) for address, namespace, _ in order] == [
            ("a", "x"), ("b", "z"), ("a", "y"), ("a", "x"), ("a", "y"), ("a", "x"), ("a", "x"),
        ]  # fmt: skip
        assert [number for _, namespace, number in order if namespace == "x"] == [0, 1, 2, 3]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_of_too_many_the_newest_of_whoever_has_most_leave() -> None:
    async def main() -> None:
        taken, left = turns.Turns(), []
        held, enough = asyncio.Event(), asyncio.Event()

        async def one(namespace: str, number: int) -> None:
            try:
                async with taken.turn("a", namespace, turns.MOST_BYTES // 8):
                    await held.wait()
            except turns.Busy:
                left.append((namespace, number))
                if len(left) == 7:
                    enough.set()

        tasks = [asyncio.create_task(one("few", number)) for number in range(3)]
        tasks += [asyncio.create_task(one("many", number)) for number in range(12)]
        tasks += [asyncio.create_task(one("few", 3))]
        await enough.wait()
        held.set()
        await asyncio.gather(*tasks)
        assert sorted(number for _, number in left) == list(range(5, 12)) and {one for one, _ in left} == {"many"}

    asyncio.run(asyncio.wait_for(main(), 60))
