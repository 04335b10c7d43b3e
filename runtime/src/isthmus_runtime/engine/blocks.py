"""A request's blocks over all KV groups: hits, growth, windows, publication. Pure bookkeeping over `kv/pool.py`."""

from __future__ import annotations

import sys
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

    @property
    def held(self) -> int:
        """Blocks that the hit holds."""
        return sum(1 for ids in self.blocks for block in ids if block)


class SequenceBlocks:
    """Maps requests to blocks. Owns no request; the pool stays the one truth about blocks."""

    def __init__(self, plan: KvPlan, pool: BlockPool, *, prefix_caching: bool) -> None:
        sizes = {group.block_size for group in plan.groups}
        assert len(sizes) == 1, f"one block size for all groups, got {sorted(sizes)}"
        self.block_size: int = sizes.pop()
        self.pool = pool
        self.groups = plan.groups
        self._windowed = any(group.window is not None for group in plan.groups)
        self._caching = prefix_caching
        self._written: list[tuple[Sequence, list[list[int]], int, int]] = []
        """What `publish` makes visible: of a request with these blocks, those between two numbers."""
        self._found: tuple[tuple[Sequence, int, int, int], Hits] | None = None
        """The newest lookup and its answer: a request that must wait repeats it at each step."""

    # --------------------------------------------------------------------------------------------- hashes and hits

    def hash_prompt(self, seq: Sequence, *, moves: bool = False) -> None:
        """Extend the chain of block hashes over the tokens known so far, if anything is found by them: in the prefix
        cache, or (`moves`) where the request's KV goes to or comes from."""
        if not self._caching and not moves:
            return
        full = len(seq.tokens) // self.block_size
        if full > len(seq.hashes):
            extra = extra_keys(seq.request)
            extend(seq.hashes, seq.tokens[: full * self.block_size], self.block_size, extra=extra)

    def find_hits(self, seq: Sequence, most_tokens: int) -> Hits:
        """Longest agreed prefix of at most `most_tokens` tokens that is cached in every group."""
        if not self._caching or most_tokens < self.block_size or not seq.hashes:
            return Hits(0, tuple(() for _ in self.groups), 0)
        asked = (seq, most_tokens, len(seq.hashes), self.pool.version)
        if self._found is not None and self._found[0] == asked:
            return self._found[1]
        per_group = [seq.hashes] * len(self.groups)
        # lookup_groups leaves one token to compute; the caller's limit already says how many may hit.
        tokens, tables = self.pool.lookup_groups(self.groups, per_group, most_tokens + 1, token_ids=seq.tokens)
        hits = self._hits(tokens, tables)
        self._found = asked, hits
        return hits

    def find_hits_of_receiver(self, seq: Sequence) -> Hits:
        """The same for a prompt that arrives whole: without what every window has passed at its end."""
        hits = self.find_hits(seq, seq.prompt_len)
        if not self._windowed:
            return hits
        tables = [list(ids) for ids in hits.blocks]
        for group, ids in zip(self.groups, tables, strict=True):
            passed = min(group.passed(seq.prompt_len), len(ids))
            ids[:passed] = [0] * passed
        return self._hits(hits.tokens, tables)

    def _hits(self, tokens: int, tables: list[list[int]]) -> Hits:
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

    def missing_to_receive(self, seq: Sequence, hits: Hits) -> int:
        """New blocks for a prompt that arrives whole: beyond the hits, what the next position looks back at."""
        want = ceil_div(seq.prompt_len, self.block_size)
        pairs = zip(self.groups, hits.blocks, strict=True)
        return sum(max(0, want - max(len(ids), group.passed(seq.prompt_len))) for group, ids in pairs)

    def take_hits(self, seq: Sequence, hits: Hits) -> None:
        """Start a run on a prefix hit: every group's hits are referenced before anything new is popped."""
        assert not any(seq.blocks), f"{seq.sid} starts while it holds blocks"
        self.pool.touch([b for ids in hits.blocks for b in ids if b])
        seq.blocks = [list(ids) for ids in hits.blocks]
        seq.trimmed = [next((i for i, b in enumerate(ids) if b), len(ids)) for ids in hits.blocks]
        seq.nulled = list(seq.trimmed)
        seq.room = hits.tokens
        seq.published = hits.tokens // self.block_size

    def grow(self, seq: Sequence, upto: int) -> list[RowBlocks]:
        """Give the request blocks for positions [0, upto), which the pool has: what changes in the block table."""
        want = ceil_div(upto, self.block_size)
        grown: list[RowBlocks] = []
        for g, ids in enumerate(seq.blocks):
            known, gone = seq.nulled[g], seq.trimmed[g]
            if gone > known:
                grown.append(RowBlocks(seq.row, g, known, (0,) * (gone - known)))
                seq.nulled[g] = gone
            if want > len(ids):
                new, _evicted = self.pool.allocate(want - len(ids))
                grown.append(RowBlocks(seq.row, g, len(ids), tuple(new)))
                ids.extend(new)
        seq.room = max(seq.room, want * self.block_size)
        return grown

    def grow_to_receive(self, seq: Sequence) -> list[tuple[int, int, int]]:
        """Give the request the blocks of `missing_to_receive`: (group, prompt block index, block id), in order."""
        want = ceil_div(seq.prompt_len, self.block_size)
        places: list[tuple[int, int, int]] = []
        for g, (group, ids) in enumerate(zip(self.groups, seq.blocks, strict=True)):
            ids.extend([0] * (group.passed(seq.prompt_len) - len(ids)))
            first = len(ids)
            ids.extend(self.pool.allocate(want - first).blocks)
            places += [(g, index, ids[index]) for index in range(first, want)]
        seq.room = want * self.block_size
        return places

    def trim(self, seq: Sequence) -> list[int]:
        """Take from the request the blocks that every later token's window has left behind."""
        freed: list[int] = []
        if not self._windowed:
            return freed
        for g, group in enumerate(self.groups):
            gone = min(group.passed(seq.written), len(seq.blocks[g]))
            first = seq.trimmed[g]
            if gone > first:
                freed += [b for b in seq.blocks[g][first:gone] if b]
                seq.blocks[g][first:gone] = [0] * (gone - first)
                seq.trimmed[g] = gone
        return freed

    def take_all(self, seq: Sequence) -> list[int]:
        """Detach every block from the request, in position order; the caller decides when they are released."""
        ids = [b for group in seq.blocks for b in group if b]
        seq.blocks = []
        seq.room = 0
        seq.published = seq.publish_at = 0
        return ids

    def wrote(self, seq: Sequence) -> None:
        """The bytes of the request's first `written` positions are complete: note the blocks for `publish`."""
        bs = self.block_size
        full = min(seq.written, len(seq.tokens)) // bs if self._caching else 0
        seq.publish_at = bs * (max(full, seq.published) + 1) if self._caching else sys.maxsize
        if full <= seq.published:
            return
        self._written.append((seq, seq.blocks, seq.published, full))
        seq.published = full

    def show(self, seq: Sequence, first: int, count: int) -> None:
        """Make `count` blocks from index `first` on visible, which were read whole. Where there is one group."""
        for i in range(first, first + count):
            tokens = seq.tokens[i * self.block_size : (i + 1) * self.block_size]
            self.pool.publish(seq.blocks[0][i], seq.hashes[i], group=0, token_ids=tokens)

    def publish(self) -> None:
        """Make the hashes of the noted blocks visible. Their requests may have ended; nobody has their blocks yet."""
        bs = self.block_size
        for seq, blocks, first, last in self._written:
            self.hash_prompt(seq)
            for i in range(first, last):
                tokens = seq.tokens[i * bs : (i + 1) * bs]
                for g, ids in enumerate(blocks):
                    if ids[i]:
                        self.pool.publish(ids[i], seq.hashes[i], group=g, token_ids=tokens)
        self._written.clear()
