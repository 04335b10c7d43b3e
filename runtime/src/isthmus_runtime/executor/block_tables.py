"""Which blocks each row has: kept on the host, taken to the device as far as a step reads them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..interfaces.steps import RowBlocks
from ..kv.groups import GroupPlan
from ..kv.pool_records import NULL_BLOCK
from .device.base import Device
from .staging import Packer

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


class StepTable(NamedTuple):
    """A group's block table in one step."""

    kernels: Tensor
    """int32 [rows, blocks]: what the kernels read, in one place for all steps."""
    target: Tensor
    """The part of it that this step reads, and so brings up to date."""
    source: Tensor
    """Where the upload has that part."""


class BlockTables:
    """The block tables of one group."""

    def __init__(self, device: Device, group: GroupPlan, *, max_rows: int, most_rows: int, max_len: int) -> None:
        """`most_rows`: of a step, dummies among them; `max_len`: positions of a row."""
        self.width = -(-max_len // group.block_size)
        """Blocks of a row."""
        self._block_size = group.block_size
        self._rows: Ints = np.zeros((max_rows, self.width), np.int32)
        self._there = device.zeros(most_rows, self.width, dtype=torch.int32)

    def start(self, row: int, block_ids: tuple[int, ...]) -> None:
        """Fill a row. What an earlier request left there is gone."""
        self._rows[row, : len(block_ids)] = block_ids
        self._rows[row, len(block_ids) :] = NULL_BLOCK

    def grow(self, blocks: RowBlocks) -> None:
        """Blocks that a row got since."""
        self._rows[blocks.row, blocks.index : blocks.index + len(blocks.block_ids)] = blocks.block_ids

    def slots(self, pack: Packer, rows: Longs, positions: Longs, num_tokens: int) -> Tensor:
        """int64 [num_tokens]: where the KV of the token of `rows` at `positions` goes; -1 for what is not written."""
        here, there = pack.take(num_tokens, torch.int64)
        size, real = self._block_size, len(positions)
        block_ids = self._rows[rows, positions // size].astype(np.int64)
        np.multiply(block_ids, size, out=here[:real])
        here[:real] += positions % size
        # A sliding window may have passed a token's block within its own chunk: the null block is never written.
        here[:real][block_ids == NULL_BLOCK] = -1
        here[real:] = -1
        return there

    def of(self, pack: Packer, rows: Longs, longest: int, num_rows: int, read: int) -> StepTable:
        """The table of a step with `num_rows` rows, the first of them `rows`, that reads `longest` positions of the
        first `read`; those beyond `rows` are dummies."""
        width = -(-longest // self._block_size)
        here, there = pack.take(read * width, torch.int32)
        grid = here.reshape(read, width)
        np.take(self._rows[:, :width], rows, axis=0, out=grid[: len(rows)])
        grid[len(rows) :] = NULL_BLOCK
        return StepTable(self._there[:num_rows], self._there[:read, :width], there.view(read, width))
