"""A request's blocks over all KV groups: hits, growth, windows, publication. Pure bookkeeping over `kv/pool.py`."""

from __future__ import annotations

from dataclasses import dataclass

from ..interfaces.steps import RowBlocks
from ..kv.groups import ceil_div
from ..kv.keys import extend, extra_keys
from ..kv.plan import KvPlan
from ..kv.pool import BlockPool
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class Hits:
    """An agreed prefix hit: the same length in every group."""

    tokens: int
    blocks: tuple[tuple[int, ...], ...]
    """Per group, block ids from position 0; 0 where a sliding group does not need the block."""
    evictable: int
    """How many of them sit in the free list: taking them shrinks it."""


class SequenceBlocks:
    """Maps requests to blocks. Owns no request; the pool stays the one truth about blocks."""

    def __init__(self, plan: KvPlan, pool: BlockPool, *, prefix_caching: bool) -> None:
        sizes = {group.block_size for group in plan.groups}
        assert len(sizes) == 1, f"one block size for all groups, got {sorted(sizes)}"
        self.block_size: int = sizes.pop()
        self.pool = pool
        self.groups = plan.groups
        self._caching = prefix_caching

    # --------------------------------------------------------------------------------------------- hashes and hits

    def hash_prompt(self, seq: Sequence) -> None:
        """Extend the chain of block hashes over the tokens known so far."""
        full = len(seq.tokens) // self.block_size
        if full > len(seq.hashes):
            extra = extra_keys(seq.request)
            extend(seq.hashes, seq.tokens[: full * self.block_size], self.block_size, extra=extra)

    def find_hits(self, seq: Sequence, most_tokens: int) -> Hits:
        """Longest agreed prefix of at most `most_tokens` tokens that is cached in every group."""
        if not self._caching or most_tokens < self.block_size or not seq.hashes:
            return Hits(0, tuple(() for _ in self.groups), 0)
        per_group = [seq.hashes] * len(self.groups)
        # lookup_groups leaves one token to compute; the caller's limit already says how many may hit.
        tokens, tables = self.pool.lookup_groups(self.groups, per_group, most_tokens + 1, token_ids=seq.tokens)
        held = [b for table in tables for b in table if b]
        return Hits(tokens, tuple(tuple(table) for table in tables), self.pool.evictable(held))

    # -------------------------------------------------------------------------------------------------- allocation

    def peak(self, length: int) -> int:
        """Most blocks a request of `length` tokens ever holds, over all groups."""
        return sum(group.blocks_needed(length) for group in self.groups)

    def missing(self, seq: Sequence, upto: int) -> int:
        """New blocks needed so that positions [0, upto) have one, over all groups."""
        want = ceil_div(upto, self.block_size)
        return sum(max(0, want - len(ids)) for ids in seq.blocks)

    def take_hits(self, seq: Sequence, hits: Hits) -> None:
        """Start a run on a prefix hit: every group's hits are referenced before anything new is popped."""
        assert not any(seq.blocks), f"{seq.sid} starts while it holds blocks"
        self.pool.touch([b for ids in hits.blocks for b in ids if b])
        seq.blocks = [list(ids) for ids in hits.blocks]
        seq.trimmed = [sum(1 for b in ids if b == 0) for ids in hits.blocks]
        seq.published = hits.tokens // self.block_size

    def grow(self, seq: Sequence, upto: int) -> list[RowBlocks]:
        """Give the request blocks for positions [0, upto). The caller has checked that the pool has them."""
        want = ceil_div(upto, self.block_size)
        grown: list[RowBlocks] = []
        for g, ids in enumerate(seq.blocks):
            if want > len(ids):
                new, _evicted = self.pool.allocate(want - len(ids))
                grown.append(RowBlocks(seq.row, g, len(ids), tuple(new)))
                ids.extend(new)
        return grown

    def trim(self, seq: Sequence) -> tuple[list[int], list[RowBlocks]]:
        """Blocks that every later token's window has left behind: (ids to release, table entries to null)."""
        freed: list[int] = []
        nulled: list[RowBlocks] = []
        for g, group in enumerate(self.groups):
            if group.window is None:
                continue
            # The next token computed is at `written`; it sees positions > written - window.
            gone = max(0, seq.written - group.window + 1) // self.block_size
            gone = min(gone, len(seq.blocks[g]))
            first = seq.trimmed[g]
            if gone > first:
                freed += seq.blocks[g][first:gone]
                seq.blocks[g][first:gone] = [0] * (gone - first)
                nulled.append(RowBlocks(seq.row, g, first, (0,) * (gone - first)))
                seq.trimmed[g] = gone
        return freed, nulled

    def take_all(self, seq: Sequence) -> list[int]:
        """Detach every block from the request, in position order; the caller decides when they are released."""
        ids = [b for group in seq.blocks for b in group if b]
        seq.blocks = []
        seq.trimmed = []
        seq.published = 0
        return ids

    def publish(self, seq: Sequence) -> None:
        """Make the hashes of blocks visible whose bytes are complete."""
        if not self._caching:
            return
        full = min(seq.written, len(seq.tokens)) // self.block_size
        if full <= seq.published:
            return
        self.hash_prompt(seq)
        bs = self.block_size
        for i in range(seq.published, full):
            tokens = seq.tokens[i * bs : (i + 1) * bs]
            for g, ids in enumerate(seq.blocks):
                if ids[i]:
                    self.pool.publish(ids[i], seq.hashes[i], group=g, token_ids=tokens)
        seq.published = full
