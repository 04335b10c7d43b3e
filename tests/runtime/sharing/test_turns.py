"""Turns are given in a circle of clients, whoever leaves and whenever."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_runtime.errors import Cancelled, InvalidRequest, Overloaded
from isthmus_runtime.sharing import threads_in_turns as turns_module
from isthmus_runtime.sharing.threads_in_turns import ThreadsInTurns, _Task, go_on
from isthmus_runtime.sharing.turns import Turns


async def take(turns: Turns, who: str, order: list[str]) -> None:
    async with turns.turn(who):
        order.append(who)
        await asyncio.sleep(0)


def run(crowd: str, most: int = 64) -> tuple[str, list[object]]:
    """Who has turns one after another when all ask at once, by a letter each, and what becomes of each."""

    async def main() -> tuple[str, list[object]]:
        turns, order = Turns(most, "wait"), []
        ends = await asyncio.gather(*(take(turns, who, order) for who in crowd), return_exceptions=True)
        return "".join(order), list(ends)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("crowd", "order"),
    [("a", "a"), ("aaaa", "aaaa"), ("aaaabb", "aababa"), ("aaabc", "aabca"), ("abab", "abab"), ("aaaab", "aabaa")],
)
def test_clients_have_turns_in_a_circle(crowd: str, order: str) -> None:
    assert run(crowd)[0] == order


def test_the_last_of_who_has_most_gives_way() -> None:
    order, ends = run("aaaaab", most=4)  # one has the turn, four wait
    assert order == "aabaa" and [isinstance(end, Overloaded) for end in ends] == [False] * 4 + [True, False]
    order, ends = run("aaaaaa", most=4)
    assert order == "aaaaa" and isinstance(ends[5], Overloaded)
    order, ends = run("aababb", most=4)  # two of each wait: the next of either is refused
    assert isinstance(ends[5], Overloaded) and sum(end is None for end in ends) == 5


def test_of_several_places_one_client_has_not_all() -> None:
    async def main() -> None:
        turns, inside = Turns(64, "wait", 3), list[str]()
        gates = {name: asyncio.Event() for name in ("a1", "a2", "a3", "b1", "b2", "c1")}

        async def stay(name: str) -> None:
            async with turns.turn(name[0]):
                inside.append(name)
                await gates[name].wait()
                inside.remove(name)

        async def settle() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(stay(name)) for name in ("a1", "a2", "a3")]
        await settle()
        assert inside == ["a1", "a2"]
        tasks += [asyncio.create_task(stay(name)) for name in ("b1", "b2", "c1")]
        await settle()
        assert inside == ["a1", "a2", "b1"]
        for gone, now in (("b1", ["a1", "a2", "b2"]), ("b2", ["a1", "a2", "c1"]), ("a1", ["a2", "c1", "a3"])):
            gates[gone].set()
            await settle()
            assert inside == now
        for gate in gates.values():
            gate.set()
        await asyncio.gather(*tasks)
        assert not turns._having and not turns._first and not turns._again

    asyncio.run(main())


@settings(max_examples=200, deadline=None)
@given(
    crowd=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans()), max_size=12),
    most=st.integers(1, 6),
    places=st.integers(1, 4),
)
def test_nobody_waits_for_who_has_left(crowd: list[tuple[str, int, bool]], most: int, places: int) -> None:
    """Each asks after some turns of the loop, and some leave after as many more: the others come to their turn, so many
    at a time, no client to all of several, and at the end the next one has it at once."""

    async def main() -> None:
        turns, inside = Turns(most, "wait", places), Counter[str]()

        async def ask(who: str, after: int) -> None:
            for _ in range(after):
                await asyncio.sleep(0)
            async with turns.turn(who):
                inside[who] += 1
                try:
                    assert inside.total() <= places and inside[who] <= max(1, places - 1)
                    await asyncio.sleep(0)
                finally:
                    inside[who] -= 1

        async def leaving(who: str, after: int) -> None:
            task = asyncio.create_task(ask(who, after))
            for _ in range(2 * after + 1):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

        works = [leaving(who, after) if leaves else ask(who, after) for who, after, leaves in crowd]
        async with asyncio.timeout(10):
            ends = await asyncio.gather(*works, return_exceptions=True)
            assert all(end is None or isinstance(end, Overloaded) for end in ends), ends
            assert not turns._having and not turns._first and not turns._again
            async with turns.turn("z"):
                assert not turns._first

    asyncio.run(main())


def test_a_thread_gives_up_what_nobody_waits_for_any_more() -> None:
    """A thread cannot be ended, but asks; its turn lasts until then."""

    async def main() -> None:
        threads = ThreadsInTurns(1, "test", 8, "wait")
        begun, left, ended = threading.Event(), threading.Event(), threading.Event()

        def long(_: object) -> None:
            begun.set()
            go_on()
            assert left.wait(60)
            try:
                go_on()
            except Cancelled:
                ended.set()
                raise

        one = asyncio.create_task(threads.do("a", long, None))
        assert await asyncio.to_thread(begun.wait, 60)
        one.cancel()
        with suppress(asyncio.CancelledError):
            await one
        left.set()
        assert await asyncio.wait_for(threads.do("b", str, 1), 60) == "1"
        assert ended.is_set()

    asyncio.run(main())


def test_a_thread_works_for_one_request_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        threads = ThreadsInTurns(1, "test", 8, "wait")
        monkeypatch.setattr(turns_module, "MOST_WORK_S", -1.0)
        with pytest.raises(InvalidRequest, match="of a processor to be tokenised"):
            await threads.do("a", lambda _: go_on(), None)
        monkeypatch.setattr(turns_module, "MOST_WORK_S", 3600.0)
        await threads.do("a", lambda _: go_on(), None)
        go_on()  # this thread works for nobody

    asyncio.run(main())


def test_where_one_place_is_left_for_a_while_all_are_given_again_afterwards() -> None:
    async def main() -> None:
        narrow, inside, most = True, list[int](), 0
        turns = Turns(64, "wait", 4, one_by_one=lambda: narrow)
        gates = [asyncio.Event() for _ in range(9)]

        async def stay(number: int) -> None:
            nonlocal most
            async with turns.turn(f"client {number}"):
                inside.append(number)
                most = max(most, len(inside))
                await gates[number].wait()
                inside.remove(number)

        async def settle() -> None:
            for _ in range(20):
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(stay(number)) for number in range(9)]
        await settle()
        assert inside == [0]
        gates[0].set()
        await settle()
        assert inside == [1]
        narrow = False
        gates[1].set()
        await settle()
        assert inside == [2, 3, 4, 5]
        narrow = True
        for number in (2, 3, 4):
            gates[number].set()
        await settle()
        assert inside == [5] and most == 4
        for gate in gates:
            gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_who_comes_to_threads_that_all_work_long_has_a_turn_before_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "TURN_S", -1.0)
    monkeypatch.setattr(turns_module, "MOST_WORK_S", 20.0)

    async def main() -> None:
        threads = ThreadsInTurns(2, "test", 8, "wait")
        served = threading.Event()

        def long(begun: threading.Event) -> str:
            begun.set()
            while not served.is_set():
                go_on()
            return "long"

        gates = [threading.Event(), threading.Event()]
        works = [asyncio.create_task(threads.do(who, long, gate)) for who, gate in zip("ab", gates, strict=True)]
        for gate in gates:
            assert await asyncio.to_thread(gate.wait, 60)
        await asyncio.wait_for(threads.do("c", lambda _: served.set(), None), 60)
        assert await asyncio.wait_for(asyncio.gather(*works), 60) == ["long", "long"]

    asyncio.run(main())


@pytest.mark.parametrize("count", [2, 3])
def test_long_works_of_many_addresses_leave_threads_and_turns_to_others(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Works that are paused keep their threads: some addresses of one client may have begun as many as there are."""
    monkeypatch.setattr(turns_module, "TURN_S", -1.0)
    monkeypatch.setattr(turns_module, "MOST_WORK_S", 3600.0)

    async def main() -> None:
        threads = ThreadsInTurns(count, "test", 256, "wait")
        served = threading.Event()
        begun = 0

        def long(_: object) -> str:
            nonlocal begun
            begun += 1
            while not served.is_set():
                go_on()
            return "long"

        crowd = 9 * count + 4
        works = [asyncio.create_task(threads.do(f"{n}", long, None)) for n in range(crowd)]
        for _ in range(60_000):
            if begun == crowd:
                break
            await asyncio.sleep(0.001)
        try:
            for who in "xyz":
                await asyncio.wait_for(threads.do(who, lambda _: None, None), 60)
        finally:
            served.set()
        ends = await asyncio.wait_for(asyncio.gather(*works, return_exceptions=True), 60)
        ended = [end for end in ends if end != "long"]
        # All but as many as may be paused, and those that had a turn then.
        assert 4 <= len(ended) <= 4 + count, ends
        assert all(isinstance(end, Overloaded) and end.status == 429 for end in ended), ends

    asyncio.run(main())


@pytest.mark.parametrize("places", [1, 3])
def test_who_has_not_begun_comes_first_and_what_goes_on_has_one_place(places: int) -> None:
    async def main() -> str:
        turns, order = Turns(64, "wait", places), []

        async def have(who: str, again: bool) -> None:
            await turns.take(who, again=again)
            order.append("A" if again else "f")
            await asyncio.sleep(0)
            turns.give_back(who, again=again)

        crowd = [have(f"{n}", again=n % 2 == 0) for n in range(12)]
        await asyncio.gather(*crowd)
        assert not turns._having and not turns._going_on
        return "".join(order)

    # With one place by turns; with three one is for what goes on, and has the next of it when it is free.
    assert asyncio.run(main()) == {1: "AfAfAfAfAfAf", 3: "AfAffAffAfAA"}[places]


def test_of_long_works_that_of_the_client_ends_that_has_taken_most() -> None:
    async def main() -> None:
        threads = ThreadsInTurns(4, "test", 64, "wait")
        tasks = []
        for who, worked_s in (("a", 9.0), ("b", 5.0), ("b", 7.0), ("b", 1.0), ("c", 1.9)):
            tasks.append(_Task(who, None))
            tasks[-1].worked_s = worked_s
        threads._long.update(tasks)
        found: list[list[int]] = []
        for few, most in ((5, 9), (4, 9), (3, 9), (2, 9), (1, 9), (1, 1)):
            threads._paused, threads._most_paused = few, most
            threads._make_way()
            found.append([number for number, task in enumerate(tasks) if task.ending])
        # b has taken 13 s, then 6 against 9 of a. The last two are not long until there are far too many.
        assert found == [[], [2], [0, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2, 4]], found

    asyncio.run(main())


@pytest.mark.parametrize("ends", ["leaves", "gives way"])
def test_a_paused_work_ends_without_another_turn(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    monkeypatch.setattr(turns_module, "TURN_S", -1.0)

    async def main() -> None:
        threads, held, ended = ThreadsInTurns(2, "test", 8, "wait"), threading.Event(), threading.Event()

        def holds(_: object) -> None:
            assert held.wait(60)

        def long(_: object) -> None:
            try:
                while True:
                    go_on()
            except (Cancelled, Overloaded):
                ended.set()
                raise

        one = asyncio.create_task(threads.do("a", long, None))
        others = [asyncio.create_task(threads.do(who, holds, None)) for who in "bc"]
        for _ in range(60_000):
            if any(task.again for task in threads._long):
                break
            await asyncio.sleep(0.001)
        if ends == "leaves":
            one.cancel()
        else:
            next(task for task in threads._long if task.again).end(Overloaded("others wait", status=429))
        assert await asyncio.to_thread(ended.wait, 60), "it waits for a turn, and both places are held"
        held.set()
        assert isinstance((await asyncio.gather(one, *others, return_exceptions=True))[0], BaseException)

    asyncio.run(main())


@settings(max_examples=40, deadline=None)
@given(
    works=st.lists(
        st.tuples(st.sampled_from("abcde"), st.integers(0, 6), st.sampled_from(["", "leaves", "fails"])), max_size=24
    ),
    most=st.integers(1, 12),
    count=st.integers(1, 4),
)
def test_every_work_ends_once_and_no_turn_is_lost(works: list[tuple[str, int, str]], most: int, count: int) -> None:
    async def main() -> None:
        threads, working = ThreadsInTurns(count, "test", most, "wait"), set[int]()
        together: list[int] = []

        def work(what: tuple[int, int, str]) -> int:
            number, steps, end = what
            for _ in range(steps):
                working.add(number)
                together.append(len(working))
                working.discard(number)
                go_on()
            if end == "fails":
                raise InvalidRequest("as it was told to")
            return number

        tasks = [
            asyncio.create_task(threads.do(who, work, (number, steps, end)))
            for number, (who, steps, end) in enumerate(works)
        ]
        for task, (_, steps, end) in zip(tasks, works, strict=True):
            if end == "leaves":
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        for number, (found, (_, _, end)) in enumerate(zip(ends, works, strict=True)):
            allowed = {
                "": Overloaded,
                "leaves": (asyncio.CancelledError, Overloaded),
                "fails": (InvalidRequest, Overloaded),
            }
            assert found == number if isinstance(found, int) else isinstance(found, allowed[end]), found
        assert max(together, default=0) <= count
        for _ in range(1000):  # threads whose client has left end by themselves
            if not threads._begun._having and not threads._turns._having:
                break
            await asyncio.sleep(0.01)
        for turns in (threads._begun, threads._turns):
            assert not turns._having and not turns._first and not turns._again

    before = turns_module.TURN_S
    turns_module.TURN_S = -1.0
    try:
        asyncio.run(main())
    finally:
        turns_module.TURN_S = before
