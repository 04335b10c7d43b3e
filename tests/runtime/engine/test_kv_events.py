"""The engine's prefix-cache events: a reader always knows exactly what the pool holds, whatever was lost on the way."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from isthmus_runtime.engine.kv_events import KvEventFeed
from isthmus_runtime.kv.pool import BlockPool
from isthmus_runtime.router.prefixes import StoredBlocks, short


def digest(n):
    return n.to_bytes(8, "big") + bytes(24)


def publish(pool, *numbers):
    blocks = pool.allocate(len(numbers)).blocks
    for block, n in zip(blocks, numbers, strict=True):
        pool.publish(block, digest(n), token_ids=[n])
    pool.release(blocks)


def apply(stored, line):
    stored.apply("e", reset=line.reset, previous=line.previous, following=line.following, changes=line.changes)


def run(work):
    asyncio.run(asyncio.wait_for(work, 20))


async def settle():
    """Let what the feed has put on the loop run."""
    for _ in range(3):
        await asyncio.sleep(0)


def has(stored, count):
    return [n for n in range(count) if stored.hit("e", [short(digest(n))])]


def test_snapshot_then_changes():
    async def main():
        feed = KvEventFeed(asyncio.get_running_loop())
        pool = BlockPool(4, events=feed.queue)
        publish(pool, 0, 1)
        await settle()
        stored = StoredBlocks()
        async with aclosing(feed.lines()) as lines:
            first = await anext(lines)
            assert first.reset
            apply(stored, first)
            assert has(stored, 6) == [0, 1]
            publish(pool, 2, 3)  # three usable blocks: one of the first two is evicted
            line = await anext(lines)
            assert not line.reset
            apply(stored, line)
            assert has(stored, 6) == [n for n in range(6) if pool.cached_block(digest(n)) is not None]
            feed.close()
            assert [line async for line in lines] == []

    run(main())


def test_a_reader_that_falls_behind_gets_a_snapshot():
    async def main():
        feed = KvEventFeed(asyncio.get_running_loop(), log_changes=2)
        pool = BlockPool(9, events=feed.queue)
        stored = StoredBlocks()
        async with aclosing(feed.lines()) as lines:
            apply(stored, await anext(lines))
            publish(pool, 0, 1, 2, 3)
            await settle()
            line = await anext(lines)
            assert line.reset
            apply(stored, line)
            assert has(stored, 6) == [0, 1, 2, 3]

    run(main())


def test_an_overflowing_queue_forgets_rather_than_lies():
    async def main():
        feed = KvEventFeed(asyncio.get_running_loop(), queue_events=2)
        pool = BlockPool(3, events=feed.queue)
        stored = StoredBlocks()
        publish(pool, 0)
        await settle()
        async with aclosing(feed.lines()) as lines:
            apply(stored, await anext(lines))
            assert has(stored, 9) == [0]
            publish(pool, 1, 2)  # evicts 0: three events, and only two fit
            publish(pool, 3, 4)
            await settle()
            line = await anext(lines)
            assert line.reset
            apply(stored, line)
            assert set(has(stored, 9)) <= {n for n in range(9) if pool.cached_block(digest(n)) is not None}

    run(main())


def test_a_block_of_several_groups_counts_once():
    async def main():
        feed = KvEventFeed(asyncio.get_running_loop())
        pool = BlockPool(9, num_groups=2, events=feed.queue)
        blocks = pool.allocate(2).blocks
        for group, block in enumerate(blocks):
            pool.publish(block, digest(5), group=group, token_ids=[5])
        await settle()
        async with aclosing(feed.lines()) as lines:
            assert (await anext(lines)).changes == ("+" + digest(5)[:8].hex(),)

    run(main())
