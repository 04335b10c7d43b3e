"""Block pool: each rule of ownership, one test each."""

from collections import deque

import pytest

from isthmus_runtime.errors import IsthmusError
from isthmus_runtime.kv.groups import GroupPlan
from isthmus_runtime.kv.keys import block_hashes, pack_tokens
from isthmus_runtime.kv.pool import BlockPool
from isthmus_runtime.kv.pool_records import BlockState, Evicted, OutOfBlocks, PoolError
from isthmus_runtime.kv.prefix import BlockEvent, BlockRemoved, BlockStored

TOKENS = list(range(64))
HASHES = block_hashes(TOKENS, 4)


def publish(pool: BlockPool, blocks: list[int], first: int = 0, group: int = 0) -> None:
    for index, block in enumerate(blocks, first):
        assert pool.publish(block, HASHES[index], group, token_ids=TOKENS[index * 4 : index * 4 + 4])


def hit(pool: BlockPool, hashes: list[bytes] = HASHES, token_ids: list[int] | None = None) -> list[int]:
    """Blocks of the longest prefix that is cached."""
    return pool.lookup_groups([GroupPlan(block_size=4)], [hashes], len(TOKENS), token_ids)[1][0]


def cached(num_blocks: int, count: int) -> tuple[BlockPool, list[int]]:
    """A pool with the first `count` blocks of TOKENS cached and unreferenced."""
    pool = BlockPool(num_blocks)
    blocks = pool.allocate(count).blocks
    publish(pool, blocks)
    pool.release(blocks)
    return pool, blocks


def test_the_null_block_is_never_given_out() -> None:
    pool = BlockPool(5)
    assert pool.usable == pool.num_free == 4
    assert sorted(pool.allocate(4).blocks) == [1, 2, 3, 4]
    assert pool.state(0) is BlockState.NULL
    with pytest.raises(OutOfBlocks) as caught:
        pool.allocate(1)
    assert (caught.value.asked, caught.value.free) == (1, 0)


def test_a_pool_may_hold_only_the_null_block() -> None:
    pool = BlockPool(1)
    assert pool.usable == pool.num_free == 0
    assert pool.allocate(0).blocks == []
    pool.check()


@pytest.mark.parametrize("arguments", [{"num_blocks": 0}, {"num_blocks": 4, "num_groups": 0}])
def test_impossible_pools_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"num_(blocks|groups): must be at least 1"):
        BlockPool(**arguments)


def test_freed_blocks_without_hash_are_reused_first_head_first() -> None:
    pool = BlockPool(10)
    blocks = pool.allocate(3).blocks
    pool.release(blocks)
    assert pool.allocate(4).blocks == [*blocks, 4]


def test_cached_blocks_are_evicted_last_and_tail_first() -> None:
    pool, blocks = cached(8, 3)
    assert hit(pool) == blocks
    assert not set(pool.allocate(4).blocks) & set(blocks)
    assert hit(pool) == blocks
    assert pool.allocate(1).blocks == [blocks[2]]
    assert hit(pool) == blocks[:2]
    assert pool.allocate(2).blocks == [blocks[1], blocks[0]]
    assert hit(pool) == []


def test_a_touched_block_moves_to_the_back() -> None:
    pool, blocks = cached(4, 3)
    pool.touch([blocks[2]])
    pool.release([blocks[2]])
    # Least recently used first: the tail of what was left, then its head, then the block used last.
    assert pool.allocate(3).blocks == [blocks[1], blocks[0], blocks[2]]


def test_touch_takes_a_hit_out_of_the_free_list() -> None:
    pool, blocks = cached(5, 2)
    assert pool.num_free == 4
    assert pool.evictable([*blocks, *blocks, 3]) == 2
    pool.touch(blocks)
    assert pool.num_free == 2
    assert pool.evictable(blocks) == 0
    assert [pool.refs(block) for block in blocks] == [1, 1]
    pool.touch(blocks)
    pool.release(blocks)
    assert pool.counts().owned == 2


def test_touch_refuses_free_blocks_and_changes_nothing() -> None:
    pool, blocks = cached(5, 1)
    with pytest.raises(PoolError, match="block 3 cannot be shared: it is FREE"):
        pool.touch([blocks[0], 3])
    assert pool.counts().cached == 1


def test_double_free_and_unknown_ids_name_the_block() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(2).blocks
    with pytest.raises(PoolError, match=f"block {blocks[1]} is given 2 times"):
        pool.release([blocks[0], blocks[1], blocks[1]])
    assert pool.counts().owned == 2
    pool.release(blocks)
    with pytest.raises(PoolError, match=f"block {blocks[0]} has no request reference"):
        pool.release([blocks[0]])
    for unknown in (-1, 5, 10**12):
        with pytest.raises(PoolError, match=f"unknown block {unknown}"):
            pool.release([unknown])
    assert issubclass(PoolError, IsthmusError)
    pool.check()


def test_null_ids_in_a_block_table_hold_nothing() -> None:
    pool = BlockPool(5)
    table = [0, 0, *pool.allocate(1).blocks]
    pool.touch(table)
    pool.release(table)
    pool.release(table)
    assert pool.num_free == 4
    pool.check()


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(PoolError, match="-1"):
        BlockPool(5).allocate(-1)


def test_an_allocation_says_what_it_evicted() -> None:
    pool, blocks = cached(5, 2)
    assert pool.allocate(2).evicted == []
    taken, evicted = pool.allocate(1)
    assert taken == [blocks[1]]
    assert evicted == [Evicted(blocks[1], HASHES[1], 0)]


def test_the_first_publisher_of_a_hash_wins() -> None:
    pool = BlockPool(5)
    one, two = pool.allocate(2).blocks
    publish(pool, [one])
    assert pool.publish(one, HASHES[0], token_ids=TOKENS[:4])
    assert not pool.publish(two, HASHES[0], token_ids=TOKENS[:4])
    assert hit(pool) == [one]
    with pytest.raises(PoolError, match="already published"):
        pool.publish(one, HASHES[1], token_ids=TOKENS[4:8])
    pool.release([two])
    assert pool.state(two) is BlockState.FREE


def test_nothing_is_visible_before_it_is_written() -> None:
    pool = BlockPool(5)
    (block,) = pool.allocate(1).blocks
    pool.lease_write([block])
    with pytest.raises(PoolError, match="it is WRITING"):
        publish(pool, [block])
    pool.end_write([block], ok=False)
    with pytest.raises(PoolError, match="its last write failed"):
        publish(pool, [block])
    pool.lease_write([block])
    pool.end_write([block], ok=True)
    publish(pool, [block])
    assert hit(pool) == [block]


def test_one_failed_writer_of_several_fails_the_block() -> None:
    pool = BlockPool(5)
    (block,) = pool.allocate(1).blocks
    pool.lease_write([block, block])
    pool.end_write([block], ok=False)
    pool.end_write([block], ok=True)
    with pytest.raises(PoolError, match="its last write failed"):
        publish(pool, [block])


def test_a_failed_write_is_forgotten_with_its_owner() -> None:
    """The next owner computes the block itself, without a lease, and may publish it."""
    pool = BlockPool(2)
    blocks = pool.allocate(1).blocks
    pool.lease_write(blocks)
    pool.end_write(blocks, ok=False)
    pool.release(blocks)
    assert pool.allocate(1).blocks == blocks
    publish(pool, blocks)


def test_only_owned_blocks_are_published() -> None:
    pool = BlockPool(5)
    with pytest.raises(PoolError, match="it is FREE"):
        publish(pool, [1])
    with pytest.raises(PoolError, match="it is NULL"):
        publish(pool, [0])
    with pytest.raises(PoolError, match="unknown group 1"):
        pool.publish(*pool.allocate(1).blocks, HASHES[0], 1, token_ids=TOKENS[:4])


def test_a_block_being_written_outlives_its_request() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1).blocks
    pool.lease_write(blocks)
    pool.release(blocks)
    assert pool.state(blocks[0]) is BlockState.WRITING
    assert pool.num_free == 0
    pool.end_write(blocks, ok=True)
    assert pool.state(blocks[0]) is BlockState.FREE


def test_a_block_being_read_is_not_evicted() -> None:
    pool, blocks = cached(2, 1)
    pool.lease_read(blocks)
    assert pool.num_free == 0
    assert hit(pool) == blocks
    pool.touch(blocks)
    pool.release(blocks)
    assert pool.num_free == 0
    pool.end_read(blocks)
    assert pool.state(blocks[0]) is BlockState.CACHED


def test_visible_or_read_blocks_are_not_written() -> None:
    pool = BlockPool(5)
    one, two, three = pool.allocate(3).blocks
    publish(pool, [one])
    pool.lease_read([two])
    for block, words in ((one, "visible"), (two, "reader lease"), (4, "it is FREE"), (0, "it is NULL")):
        with pytest.raises(PoolError, match=words):
            pool.lease_write([three, block])
        assert pool.state(three) is BlockState.OWNED
    pool.lease_write([three])
    with pytest.raises(PoolError, match="it is WRITING"):
        pool.lease_read([three])
    with pytest.raises(PoolError, match="it is FREE"):
        pool.lease_read([4])


def test_ending_a_lease_that_is_not_out_is_refused() -> None:
    pool = BlockPool(5)
    (block,) = pool.allocate(1).blocks
    with pytest.raises(PoolError, match=f"block {block} has no writer lease"):
        pool.end_write([block], ok=True)
    with pytest.raises(PoolError, match=f"block {block} has no reader lease"):
        pool.end_read([block])
    with pytest.raises(PoolError, match="block 0 has no reader lease"):
        pool.end_read([0])


def test_quarantine_keeps_a_block_until_the_writer_is_gone() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2).blocks
    pool.lease_write(blocks)
    pool.quarantine(blocks)
    assert pool.counts().quarantined == 2
    assert pool.num_free == 0
    pool.end_write(blocks[:1], ok=True)
    assert pool.state(blocks[0]) is BlockState.QUARANTINED
    for refused in (pool.release, pool.touch, pool.lease_read, pool.lease_write, pool.quarantine):
        with pytest.raises(PoolError, match=f"block {blocks[1]}"):
            refused([blocks[1]])
    pool.unquarantine(blocks)
    assert pool.num_free == 2
    with pytest.raises(PoolError, match="is not quarantined: it is FREE"):
        pool.unquarantine([blocks[0]])
    pool.check()


def test_quarantine_needs_a_writer() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2).blocks
    pool.lease_write(blocks[:1])
    with pytest.raises(PoolError, match="release it instead"):
        pool.quarantine(blocks)
    with pytest.raises(PoolError, match=r"named twice in one quarantine: \[1\]"):
        pool.quarantine([1, 1])
    assert pool.counts().quarantined == 0


def test_a_shared_quarantined_block_is_never_published() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1).blocks
    pool.touch([block])
    pool.lease_write([block])
    pool.quarantine([block])
    pool.unquarantine([block])
    assert pool.state(block) is BlockState.OWNED
    with pytest.raises(PoolError, match="its last write failed"):
        publish(pool, [block])
    pool.release([block])
    assert pool.num_free == 2


def test_a_hit_is_the_longest_prefix_and_takes_nothing() -> None:
    pool = BlockPool(8)
    blocks = pool.allocate(4).blocks
    publish(pool, [blocks[0], blocks[1]])
    publish(pool, [blocks[3]], first=3)
    assert hit(pool) == blocks[:2]
    assert hit(pool, []) == hit(pool, HASHES[2:3]) == []
    assert [pool.refs(block) for block in blocks] == [1, 1, 1, 1]
    with pytest.raises(PoolError, match="unknown group -1"):
        pool.cached_block(HASHES[0], group=-1)


def test_token_ids_are_compared_on_a_hit() -> None:
    pool, blocks = cached(8, 3)
    assert hit(pool, HASHES, TOKENS) == blocks
    other = [*TOKENS[:5], 999, *TOKENS[6:]]
    assert hit(pool, HASHES, other) == blocks[:1]
    assert hit(pool, HASHES[:1], TOKENS[:6]) == blocks[:1]


def test_without_prefix_caching_nothing_hits() -> None:
    pool = BlockPool(4, prefix_caching=False)
    blocks = pool.allocate(1).blocks
    assert not pool.publish(blocks[0], HASHES[0], token_ids=TOKENS[:4])
    assert hit(pool) == []
    pool.release(blocks)
    assert pool.counts().cached == 0


def test_groups_do_not_see_each_others_hashes() -> None:
    pool = BlockPool(4, num_groups=2)
    (block,) = pool.allocate(1).blocks
    publish(pool, [block], group=1)
    assert pool.cached_block(HASHES[0], group=0) is None
    assert pool.cached_block(HASHES[0], group=1) == block


def test_events_tell_what_is_visible_and_show_an_overflow() -> None:
    events: deque[BlockEvent] = deque(maxlen=2)
    pool = BlockPool(3, events=events)
    blocks = pool.allocate(2).blocks
    publish(pool, blocks)
    assert list(events) == [BlockStored(0, HASHES[0], 0), BlockStored(1, HASHES[1], 0)]
    pool.release(blocks)
    pool.allocate(1)
    assert list(events) == [BlockStored(1, HASHES[1], 0), BlockRemoved(2, HASHES[1], 0)]


def test_counts_name_every_state() -> None:
    pool = BlockPool(10)
    owned, writing, lost, kept = (pool.allocate(1).blocks for _ in range(4))
    pool.lease_write(writing + lost)
    pool.quarantine(lost)
    publish(pool, kept)
    pool.release(kept)
    counts = pool.counts()
    assert (counts.free, counts.owned, counts.writing, counts.cached, counts.quarantined, counts.null) == (
        5,
        1,
        1,
        1,
        1,
        1,
    )
    assert counts.total == 10
    assert pool.state(owned[0]) is BlockState.OWNED
    pool.check([*owned, *kept])


def test_check_notices_a_broken_pool() -> None:
    """A checker that cannot fail proves nothing: damage each part and expect the assertion."""

    def damaged(part: str) -> BlockPool:
        pool, blocks = cached(8, 2)
        held = pool.allocate(1).blocks
        pool.release(pool.allocate(2).blocks)
        match part:
            case "hold":
                pool._refs[held[0]] = 0
            case "negative":
                pool._refs[held[0]] = -1
            case "count":
                pool._count[BlockState.OWNED] += 1
            case "listed twice":
                pool._free._blank[0] = pool._free._blank[1]
            case "lost from the list":
                pool._free._blank.pop()
            case "lost from the lru":
                del pool._free.cached[blocks[0]]
            case "hash":
                pool._index._maps[0][HASHES[0]] = blocks[1]
            case "state":
                pool._state[held[0]] = BlockState.WRITING
            case _:
                raise AssertionError(part)
        return pool

    parts = ("hold", "negative", "count", "listed twice", "lost from the list", "lost from the lru", "hash", "state")
    for part in parts:
        with pytest.raises(AssertionError):
            damaged(part).check()


def test_a_million_blocks() -> None:
    pool = BlockPool(10**6 + 1)
    blocks = pool.allocate(10**6).blocks
    assert pool.num_free == 0
    pool.release(blocks)
    assert pool.allocate(3).blocks == blocks[:3]
    assert pool.counts().total == 10**6 + 1
    pool.check(blocks[:10])


def test_token_ids_are_packed_only_to_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, _ = cached(9, 3)
    packed: list[int] = []
    monkeypatch.setattr(
        "isthmus_runtime.kv.prefix.pack_tokens", lambda ids: packed.append(len(ids)) or pack_tokens(ids)
    )
    assert hit(pool, HASHES[4:], TOKENS) == [] and not packed
    assert len(hit(pool, HASHES, TOKENS)) == 3 and packed == [64]


def test_lookup_groups_of_an_empty_prompt() -> None:
    pool = BlockPool(4, num_groups=2)
    groups = [GroupPlan(block_size=4), GroupPlan(block_size=4, window=5)]
    assert pool.lookup_groups(groups, [[], []], 0) == (0, [[], []])
