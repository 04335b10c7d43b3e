"""What the block pool gives out: states of blocks and their counts, allocations, and its errors."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from ..errors import IsthmusError

NULL_BLOCK = 0
"""Placeholder for positions that are skipped: never allocated, written or freed."""


class PoolError(IsthmusError):
    """The caller broke a rule of ownership (double free, unknown id, write to visible bytes)."""


class OutOfBlocks(PoolError):
    """More blocks were asked for than are free or evictable. Nothing was allocated."""

    def __init__(self, asked: int, free: int) -> None:
        super().__init__(f"asked for {asked} KV blocks, {free} are free; check num_free before allocating")
        self.asked = asked
        self.free = free


class BlockState(IntEnum):
    """What a block is doing. Exactly one state at any time."""

    FREE = 0
    OWNED = 1
    WRITING = 2
    CACHED = 3
    QUARANTINED = 4
    NULL = 5


@dataclass(frozen=True, slots=True)
class Evicted:
    """A cached block that was taken for other use. Its bytes stay until whoever took it writes."""

    block_id: int
    block_hash: bytes
    group: int


class Allocation(NamedTuple):
    """Blocks that were taken, and what they were in the prefix cache: a host tier may write that back first."""

    blocks: list[int]
    evicted: list[Evicted]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCounts:
    """Number of blocks in each state. ``total`` equals the size of the pool."""

    free: int
    owned: int
    writing: int
    cached: int
    quarantined: int
    null: int

    @property
    def total(self) -> int:
        return self.free + self.owned + self.writing + self.cached + self.quarantined + self.null
