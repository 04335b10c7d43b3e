"""Owner of KV block ids: free list, prefix cache, and three separate holds on every block.

A block is held by *request references* (its bytes belong to requests), *reader leases* (a transfer or copy still
reads it) and *writer leases* (a transfer or copy may still write it). It returns to circulation only when all three
are gone. Block 0 is the null block: a placeholder for skipped positions, never allocated, written or freed.

States: ``FREE``, ``OWNED`` (referenced, or only read), ``WRITING`` (a writer lease is out), ``CACHED`` (published
and unreferenced: still a hit, may be evicted), ``QUARANTINED`` (a writer's drain is unknown) and ``NULL``; their
counts always sum to the number of blocks.

The pool is not thread-safe: one loop owns it. Every operation checks all its arguments before it changes anything,
so an error leaves the pool as it was.
"""

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from .free_list import FreeList
from .groups import GroupPlan
from .pool_records import NULL_BLOCK, Allocation, BlockState, Evicted, OutOfBlocks, PoolCounts, PoolError
from .prefix import BlockEvent, PrefixIndex


class BlockPool:
    """Pool of ``num_blocks`` block ids, block 0 being null.

    Args:
        num_blocks: physical blocks, null block included; at least 1.
        num_groups: KV cache groups; each has its own prefix map, all share the ids.
        prefix_caching: when false, nothing is published and nothing hits.
        events: optional queue of prefix-cache changes, for cache-aware routing. Give a bounded deque; a gap in
            ``seq`` tells the consumer that it overflowed.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        num_groups: int = 1,
        prefix_caching: bool = True,
        events: deque[BlockEvent] | None = None,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks: must be at least 1 (the null block), got {num_blocks}")
        if num_groups < 1:
            raise ValueError(f"num_groups: must be at least 1, got {num_groups}")
        self.num_blocks = num_blocks
        self.num_groups = num_groups
        self.prefix_caching = prefix_caching
        self.version = 0
        """Changes when a lookup, or what it says about eviction, may."""
        self._refs = array("i", bytes(4 * num_blocks))
        self._readers = array("i", bytes(4 * num_blocks))
        self._writers = array("i", bytes(4 * num_blocks))
        self._state = bytearray(num_blocks)
        self._state[NULL_BLOCK] = BlockState.NULL
        self._count = [0] * len(BlockState)
        self._count[BlockState.FREE] = num_blocks - 1
        self._count[BlockState.NULL] = 1
        self._free = FreeList(num_blocks)
        self._index = PrefixIndex(num_groups, events)
        self._quarantined: set[int] = set()
        self._failed: set[int] = set()

    # ---- numbers -------------------------------------------------------------------------------------------------

    @property
    def usable(self) -> int:
        """Blocks that requests can ever hold: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can give now: free ones and evictable cached ones."""
        return self._count[BlockState.FREE] + self._count[BlockState.CACHED]

    def counts(self) -> PoolCounts:
        """Number of blocks in each state, O(1)."""
        free, owned, writing, cached, quarantined, null = self._count
        return PoolCounts(free=free, owned=owned, writing=writing, cached=cached, quarantined=quarantined, null=null)

    def state(self, block_id: int) -> BlockState:
        """State of one block."""
        self._known(block_id)
        return BlockState(self._state[block_id])

    def refs(self, block_id: int) -> int:
        """Request references on one block."""
        self._known(block_id)
        return self._refs[block_id]

    def evictable(self, block_ids: Iterable[int]) -> int:
        """How many distinct blocks of these sit in the free list, so that touching them shrinks ``num_free``."""
        return sum(1 for block in set(block_ids) if block in self._free.cached)

    # ---- prefix cache --------------------------------------------------------------------------------------------

    def cached_block(self, block_hash: bytes, group: int = 0) -> int | None:
        """The visible block with this hash in this group, or None. Token ids are not compared."""
        self._known_group(group)
        return self._index.find(block_hash, group)

    def lookup_groups(
        self,
        groups: Sequence[GroupPlan],
        hashes: Sequence[Sequence[bytes]],
        num_tokens: int,
        token_ids: Sequence[int] | bytes | None = None,
    ) -> tuple[int, list[list[int]]]:
        """One hit length for all groups, and each group's block table for it.

        Args:
            groups: the plan's groups; ``hashes[i]`` are the chained hashes at ``groups[i].block_size``.
            num_tokens: prompt length; at most ``num_tokens - 1`` tokens hit.

        Returns:
            (tokens, blocks per group). Positions that a sliding window no longer needs hold the null block.
        """
        return self._index.longest_hit(groups, hashes, num_tokens, token_ids)

    def publish(self, block_id: int, block_hash: bytes, group: int = 0, *, token_ids: Sequence[int] | bytes) -> bool:
        """Make an owned, completely written block visible under its hash.

        The first publisher of a hash wins; equal content in a second block is not merged, because block tables are
        append-only. Call it only when the bytes are in the block: after the forward pass, or after ``end_write``.

        Returns:
            True when this block is the visible one, False when another is (or prefix caching is off).

        Raises:
            PoolError: the block is not owned, has a writer lease, is quarantined, its last write failed, or it is
                already published under another hash.
        """
        self._known(block_id)
        self._known_group(group)
        state = self._state[block_id]
        if state != BlockState.OWNED or self._refs[block_id] == 0:
            raise PoolError(f"block {block_id} cannot be published: it is {BlockState(state).name}, not owned")
        if block_id in self._failed:
            raise PoolError(f"block {block_id} cannot be published: its last write failed")
        if not self.prefix_caching:
            return False
        current = self._index.key_of(block_id)
        if current is None:
            self.version += 1
            return self._index.add(block_id, block_hash, group, token_ids)
        if current != (block_hash, group):
            raise PoolError(f"block {block_id} is already published under another hash")
        return True

    # ---- request references --------------------------------------------------------------------------------------

    def touch(self, block_ids: Sequence[int]) -> None:
        """Take one request reference on each block: prefix hits, or blocks shared by a fork. Null ids are skipped.

        Raises:
            PoolError: a block is free or quarantined (its bytes belong to no request).
        """
        for block in block_ids:
            self._known(block)
            if self._state[block] in (BlockState.FREE, BlockState.QUARANTINED):
                raise PoolError(f"block {block} cannot be shared: it is {BlockState(self._state[block]).name}")
        for block in block_ids:
            if block != NULL_BLOCK:
                self._refs[block] += 1
                self._settle(block)

    def allocate(self, n: int) -> Allocation:
        """Take ``n`` blocks, each with one request reference, evicting least recently used cache as needed.

        Raises:
            OutOfBlocks: ``n > num_free``; nothing was taken.
        """
        if n < 0:
            raise PoolError(f"cannot allocate {n} blocks")
        if n > self.num_free:
            raise OutOfBlocks(n, self.num_free)
        blocks, cached = self._free.take(n)
        evicted = [Evicted(block, *self._index.remove(block)) for block in cached]
        self.version += len(evicted)
        for block in blocks:
            self._refs[block] = 1
            self._state[block] = BlockState.OWNED
        self._count[BlockState.FREE] -= n - len(evicted)
        self._count[BlockState.CACHED] -= len(evicted)
        self._count[BlockState.OWNED] += n
        return Allocation(blocks, evicted)

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one request reference on each block of a request, given first to last. Null ids are skipped.

        Blocks are freed last to first, so that the tail of a prefix is evicted before its head. A block that is
        still read or written stays out of circulation until its last lease ends.

        Raises:
            PoolError: an unknown id, or more releases than references (double free); nothing changed.
        """
        self._check_holds(block_ids, self._refs, "request reference", skip_null=True)
        for block in reversed(block_ids):
            if block != NULL_BLOCK:
                self._refs[block] -= 1
                self._settle(block)

    # ---- leases --------------------------------------------------------------------------------------------------

    def lease_write(self, block_ids: Sequence[int]) -> None:
        """Note that a transfer or copy will write these owned blocks. A new round of writes clears a past failure.

        Raises:
            PoolError: a block is not held by a request, is visible in the prefix cache, is being read, or is
                quarantined; nothing changed.
        """
        for block in block_ids:
            self._known(block)
            state = BlockState(self._state[block])
            if state not in (BlockState.OWNED, BlockState.WRITING) or self._refs[block] == 0:
                raise PoolError(f"block {block} cannot be written: it is {state.name} and no request holds it")
            if block in self._index:
                raise PoolError(f"block {block} cannot be written: its bytes are visible in the prefix cache")
            if self._readers[block]:
                raise PoolError(f"block {block} cannot be written: {self._readers[block]} reader lease(s) are out")
        for block in block_ids:
            if self._writers[block] == 0:
                self._failed.discard(block)
            self._writers[block] += 1
            self._settle(block)

    def end_write(self, block_ids: Sequence[int], ok: bool) -> None:
        """End one writer lease on each block. With ``ok`` false the block cannot be published until rewritten.

        A quarantined block stays quarantined until ``unquarantine``.

        Raises:
            PoolError: a block has no writer lease left; nothing changed.
        """
        self._check_holds(block_ids, self._writers, "writer lease")
        for block in block_ids:
            self._writers[block] -= 1
            if not ok:
                self._failed.add(block)
            self._settle(block)

    def lease_read(self, block_ids: Sequence[int]) -> None:
        """Note that a transfer or copy reads these blocks: they are neither reused nor evicted meanwhile.

        Raises:
            PoolError: a block is free, being written or quarantined; nothing changed.
        """
        for block in block_ids:
            self._known(block)
            if self._state[block] not in (BlockState.OWNED, BlockState.CACHED):
                raise PoolError(f"block {block} cannot be read: it is {BlockState(self._state[block]).name}")
        for block in block_ids:
            self._readers[block] += 1
            if self._state[block] != BlockState.OWNED:
                self._settle(block)

    def end_read(self, block_ids: Sequence[int]) -> None:
        """End one reader lease on each block.

        Raises:
            PoolError: a block has no reader lease left; nothing changed.
        """
        self._check_holds(block_ids, self._readers, "reader lease")
        for block in reversed(block_ids):
            self._readers[block] -= 1
            if not (self._readers[block] or self._refs[block]):
                self._settle(block)

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """Take blocks whose writer may still be writing out of circulation, ending the request's reference.

        Raises:
            PoolError: a block has no writer lease (release it instead), is quarantined already or is named twice;
                nothing changed.
        """
        if len(set(block_ids)) != len(block_ids):
            raise PoolError(f"blocks named twice in one quarantine: {_repeated(block_ids)}")
        for block in block_ids:
            self._known(block)
            if block in self._quarantined:
                raise PoolError(f"block {block} is already quarantined")
            if self._writers[block] == 0:
                raise PoolError(f"block {block} has no writer lease: release it instead of quarantining it")
        for block in block_ids:
            self._quarantined.add(block)
            if self._refs[block]:
                self._refs[block] -= 1
            self._settle(block)

    def unquarantine(self, block_ids: Sequence[int]) -> None:
        """Return quarantined blocks: the writer is drained, or its peer's epoch is over. Ends its leases.

        Raises:
            PoolError: a block is not quarantined, or is named twice; nothing changed.
        """
        if len(set(block_ids)) != len(block_ids):
            raise PoolError(f"blocks named twice in one unquarantine: {_repeated(block_ids)}")
        for block in block_ids:
            self._known(block)
            if block not in self._quarantined:
                raise PoolError(f"block {block} is not quarantined: it is {BlockState(self._state[block]).name}")
        for block in block_ids:
            self._quarantined.discard(block)
            self._writers[block] = 0
            # Nobody knows which bytes of the block arrived.
            self._failed.add(block)
            self._settle(block)

    # ---- checks --------------------------------------------------------------------------------------------------

    def check(self, block_ids: Iterable[int] | None = None) -> None:
        """Assert the invariants. Costs O(blocks); with ``block_ids``, only the totals and those blocks (a sample).

        Raises:
            AssertionError: naming the broken rule.
        """
        counts = self.counts()
        assert counts.total == self.num_blocks, f"states sum to {counts.total}, pool has {self.num_blocks}: {counts}"
        blank, lru = self._free.num_blank, len(self._free.cached)
        assert blank == counts.free, f"free list holds {blank}, {counts.free} blocks are FREE"
        assert lru == counts.cached, f"LRU holds {lru}, {counts.cached} blocks are CACHED"
        self._index.check()
        for block in range(self.num_blocks) if block_ids is None else block_ids:
            self._check_block(block)
        if block_ids is not None:
            return
        recount = Counter(self._state)
        assert all(recount[state] == self._count[state] for state in BlockState), f"{counts} but states are {recount}"
        for block in self._free.check():
            assert self._state[block] == BlockState.FREE, f"block {block} is in the free list but not FREE"
        evictable = {block for block in self._index if not self._held(block)}
        assert set(self._free.cached) == evictable, "LRU differs from evictable blocks"

    def _check_block(self, block: int) -> None:
        self._known(block)
        holds = (self._refs[block], self._readers[block], self._writers[block])
        assert min(holds) >= 0, f"block {block} has a negative hold: {holds}"
        derived = self._derive(block)
        assert self._state[block] == derived, f"block {block} is {self._state[block]}, its holds say {derived.name}"
        if self._free.never_given(block):
            assert derived is BlockState.FREE, f"block {block} was never given out but is {derived.name}"
        key = self._index.key_of(block)
        if key is not None:
            assert self._index.find(*key) == block, f"block {block} is not under its hash"
            assert self._writers[block] == 0, f"block {block} is visible while it is written"
        assert (block in self._free.cached) == (derived is BlockState.CACHED), f"block {block}: LRU and state disagree"

    # ---- internals -----------------------------------------------------------------------------------------------

    def _known(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise PoolError(f"unknown block {block}: ids are 0 to {self.num_blocks - 1}")

    def _known_group(self, group: int) -> None:
        if not 0 <= group < self.num_groups:
            raise PoolError(f"unknown group {group}: the pool has {self.num_groups}")

    def _held(self, block: int) -> bool:
        return bool(self._refs[block] or self._readers[block] or self._writers[block] or block in self._quarantined)

    def _derive(self, block: int) -> BlockState:
        if block == NULL_BLOCK:
            return BlockState.NULL
        if block in self._quarantined:
            return BlockState.QUARANTINED
        if self._writers[block]:
            return BlockState.WRITING
        if self._refs[block] or self._readers[block]:
            return BlockState.OWNED
        return BlockState.CACHED if block in self._index else BlockState.FREE

    def _settle(self, block: int) -> None:
        """Move a block to the state its holds give it. FREE is left only by ``allocate``."""
        old, new = self._state[block], self._derive(block)
        if old == new:
            return
        self._state[block] = new
        self._count[old] -= 1
        self._count[new] += 1
        if old == BlockState.CACHED:
            self.version += 1
            self._free.keep(block)
        if new is BlockState.FREE:
            self._failed.discard(block)
            self._free.give(block)
        elif new is BlockState.CACHED:
            self.version += 1
            self._free.give_cached(block)

    def _check_holds(
        self, block_ids: Sequence[int], holds: Sequence[int], what: str, *, skip_null: bool = False
    ) -> None:
        for block in block_ids:
            self._known(block)
            if holds[block] == 0 and not (skip_null and block == NULL_BLOCK):
                raise PoolError(f"block {block} has no {what} to end: it is {BlockState(self._state[block]).name}")
        if len(set(block_ids)) == len(block_ids):
            return
        for block, times in Counter(block_ids).items():
            if times > holds[block] and not (skip_null and block == NULL_BLOCK):
                raise PoolError(f"block {block} is given {times} times but has {holds[block]} {what}(s)")


def _repeated(block_ids: Iterable[int]) -> list[int]:
    return sorted(block for block, times in Counter(block_ids).items() if times > 1)
