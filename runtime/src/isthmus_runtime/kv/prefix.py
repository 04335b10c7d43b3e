"""Prefix index of the block pool: which block is visible under which hash, and the token ids that it stands for."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .groups import GroupPlan, agree_hit_length
from .keys import pack_tokens
from .pool_records import NULL_BLOCK


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block became a prefix-cache hit. ``seq`` counts events of this pool without gaps."""

    seq: int
    block_hash: bytes
    group: int


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block stopped being a prefix-cache hit (evicted)."""

    seq: int
    block_hash: bytes
    group: int


BlockEvent = BlockStored | BlockRemoved


@dataclass(frozen=True, slots=True)
class _Entry:
    block_hash: bytes
    group: int
    tokens: bytes


class PrefixIndex:
    """Visible blocks by (group, hash). Belongs to one ``BlockPool``, which decides what may become visible.

    Args:
        num_groups: KV cache groups; each has its own map.
        events: optional queue of changes. Give a bounded deque; a gap in ``seq`` tells the consumer of an overflow.
    """

    def __init__(self, num_groups: int, events: deque[BlockEvent] | None = None) -> None:
        self._maps: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._entries: dict[int, _Entry] = {}
        self._events = events
        self._seq = 0

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def find(self, block_hash: bytes, group: int) -> int | None:
        """The visible block under this hash. Token ids are not compared."""
        return self._maps[group].get(block_hash)

    def key_of(self, block: int) -> tuple[bytes, int] | None:
        """(hash, group) under which this block is visible, or None."""
        entry = self._entries.get(block)
        return None if entry is None else (entry.block_hash, entry.group)

    def match(self, hashes: Sequence[bytes], index: int, group: int, packed: bytes | None) -> int | None:
        """The visible block for the ``index``-th block of a sequence whose packed token ids are ``packed``.

        A block with other ids is not a hit. Without ids only the hash is compared.
        """
        block = self._maps[group].get(hashes[index])
        if block is None or packed is None:
            return block
        stored = self._entries[block].tokens
        start = index * len(stored)
        if packed[start : start + len(stored)] != stored:
            return None
        return block

    def longest_hit(
        self,
        groups: Sequence[GroupPlan],
        hashes: Sequence[Sequence[bytes]],
        num_tokens: int,
        token_ids: Sequence[int] | bytes | None,
    ) -> tuple[int, list[list[int]]]:
        """See `BlockPool.lookup_groups`."""
        packed: bytes | None = None

        def cached(group: int, index: int) -> bool:
            nonlocal packed
            if index >= len(hashes[group]):
                return False
            if packed is None and token_ids is not None and self.find(hashes[group][index], group) is not None:
                packed = pack_tokens(token_ids)  # of a prompt of which nothing is known, nothing is compared
            return self.match(hashes[group], index, group, packed) is not None

        length = agree_hit_length(groups, cached, num_tokens)
        tables: list[list[int]] = []
        for number, group in enumerate(groups):
            stop = length // group.block_size
            start = stop - group.hit_run(stop)
            table = [NULL_BLOCK] * start
            for index in range(start, stop):
                block = self.match(hashes[number], index, number, packed)
                assert block is not None, f"agreed hit misses block {index} of group {number}"
                table.append(block)
            tables.append(table)
        return length, tables

    def add(self, block: int, block_hash: bytes, group: int, token_ids: Sequence[int] | bytes) -> bool:
        """Make a block visible unless another block is visible under this hash; says whether it did."""
        assert block not in self._entries, f"block {block} is visible already"
        table = self._maps[group]
        if block_hash in table:
            return False
        table[block_hash] = block
        self._entries[block] = _Entry(block_hash, group, pack_tokens(token_ids))
        self._emit(BlockStored, block_hash, group)
        return True

    def remove(self, block: int) -> tuple[bytes, int]:
        """Make a visible block invisible; the (hash, group) under which it was."""
        entry = self._entries.pop(block)
        del self._maps[entry.group][entry.block_hash]
        self._emit(BlockRemoved, entry.block_hash, entry.group)
        return entry.block_hash, entry.group

    def check(self) -> None:
        """Assert that maps and entries mirror one another."""
        visible = sum(map(len, self._maps))
        assert visible == len(self._entries), f"{visible} hashes for {len(self._entries)} visible blocks"

    def _emit(self, kind: type[BlockStored] | type[BlockRemoved], block_hash: bytes, group: int) -> None:
        if self._events is not None:
            self._events.append(kind(self._seq, block_hash, group))
            self._seq += 1
