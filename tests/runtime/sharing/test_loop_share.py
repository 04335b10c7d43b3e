"""Work that is due all at once is spread over turns of the event loop."""

import asyncio
from collections import Counter
from contextlib import suppress
from functools import partial

from isthmus_runtime.sharing.loop_share import LoopShare


def test_a_turn_has_no_more_of_it_than_its_share_and_one_piece():
    now, turn, done = 0.0, 0, []
    share = LoopShare(0.02, lambda: now)

    def take(seconds):
        nonlocal now
        now += seconds

    async def piece(number, seconds):
        await share.room()
        share.spend(partial(take, seconds))
        done.append((turn, number))

    async def main():
        nonlocal turn
        pieces = [asyncio.create_task(piece(number, 0.009)) for number in range(20)]
        while not all(one.done() for one in pieces):
            await asyncio.sleep(0)
            turn += 1
        assert [number for _, number in done] == list(range(20)), "in the order of asking"
        assert max(sum(at == one for at, _ in done) for one, _ in done) == 3
        await asyncio.sleep(0)
        await asyncio.wait_for(piece(20, 0.0), 60)  # and afterwards there is room at once

    asyncio.run(main())


def test_work_that_fails_has_spent_its_time_as_well():
    now = 0.0
    share = LoopShare(0.02, lambda: now)

    def fail():
        nonlocal now
        now += 1
        raise ValueError

    async def main():
        waits = asyncio.create_task(share.room())
        with suppress(ValueError):
            share.spend(fail)
        await asyncio.sleep(0)
        assert not waits.done()
        await asyncio.wait_for(waits, 60)

    asyncio.run(main())


def test_clients_are_served_in_a_circle_and_those_that_have_left_take_no_room():
    now, done = 0.0, []
    share = LoopShare(0.02, lambda: now)

    def take():
        nonlocal now
        now += 0.02

    async def piece(who):
        await share.room(who)
        share.spend(take)
        done.append(who)

    async def main():
        crowd = [asyncio.create_task(piece("many")) for _ in range(50)]
        await asyncio.sleep(0)
        crowd.append(asyncio.create_task(piece("few")))
        await asyncio.sleep(0)
        for one in crowd[20:30]:
            one.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
        assert done.index("few") <= 4 and done.count("many") == 40

    asyncio.run(asyncio.wait_for(main(), 60))


def test_pieces_that_take_longer_than_those_before_have_no_more_of_a_turn():
    now, turn, spent, done = 0.0, 0, Counter(), []
    share = LoopShare(0.02, lambda: now)

    def take(seconds):
        nonlocal now
        now += seconds
        spent[turn] += seconds

    async def piece(number, seconds):
        await share.room("one")
        share.spend(partial(take, seconds))
        done.append(number)

    async def main():
        nonlocal turn
        costs = [0.00005] * 1500 + [0.009] * 100
        pieces = [asyncio.create_task(piece(*one)) for one in enumerate(costs)]
        while not all(one.done() for one in pieces):
            await asyncio.sleep(0)
            turn += 1
        assert done == list(range(1600)), "in the order of asking"
        assert max(spent.values()) < 0.02 + 0.009

    asyncio.run(asyncio.wait_for(main(), 60))
