"""The order in which blocks are reused."""

from collections import OrderedDict


class FreeList:
    """Blocks that may be taken, in one queue of three parts.

    First blocks without a hash (a stack), then ids that were never given out (a counter, so that a huge pool costs
    nothing to make), then evictable blocks from least to most recently used (a linked hash map: removal from the middle
    is O(1)). Block 0 is never in it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.cached: OrderedDict[int, None] = OrderedDict()
        """Evictable blocks. Others read it; it is changed here alone."""
        self._num_blocks = num_blocks
        self._blank: list[int] = []
        self._fresh = 1

    @property
    def num_blank(self) -> int:
        """Blocks that can be taken without evicting."""
        return len(self._blank) + self._num_blocks - self._fresh

    def take(self, n: int) -> tuple[list[int], list[int]]:
        """The next `n` blocks, of which there must be as many; and those among them that were evictable."""
        blocks: list[int] = []
        blank = self._blank
        while blank and len(blocks) < n:
            blocks.append(blank.pop())
        stop = min(self._num_blocks, self._fresh + n - len(blocks))
        blocks.extend(range(self._fresh, stop))
        self._fresh = stop
        cached = [self.cached.popitem(last=False)[0] for _ in range(n - len(blocks))]
        return blocks + cached, cached

    def give(self, block: int) -> None:
        """A block without a hash: the next to be taken."""
        self._blank.append(block)

    def give_cached(self, block: int) -> None:
        """An evictable block: the last to be taken."""
        self.cached[block] = None

    def keep(self, block: int) -> None:
        """An evictable block is in use again."""
        del self.cached[block]

    def never_given(self, block: int) -> bool:
        """Whether the block was never taken."""
        return block >= self._fresh

    def check(self) -> list[int]:
        """The blocks that were given back without a hash, after asserting that each is there once."""
        listed = set(self._blank)
        assert len(listed) == len(self._blank), f"blocks are twice in the free list: {sorted(self._blank)}"
        assert max(listed, default=0) < self._fresh, f"block {max(listed)} is both listed free and never used"
        return self._blank
