"""The persistent input batch: one row per running request, kept up to date by differences.

Every buffer is made once. A step is turned into kernel arguments by a fixed number of numpy calls, whatever the number
of requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..interfaces.steps import RowBlocks, RowStart, StepPlan
from ..kv.groups import GroupPlan
from ..layers.batch import ForwardBatch, GroupBatch
from .kv_cache import NULL_BLOCK

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
_LEAST_INT64, _UINT64 = -(2**63), 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """Which rows sample in a step, and for which position each draws."""

    rows: Longs
    positions: Longs


class InputBatch:
    """State of all rows: known tokens, block tables, sampling parameters.

    Attributes (by row): `tokens` [rows, max_len + 1], and the sampling arrays `temperature`, `top_k`, `top_p`,
    `min_p`, `seed`, `logprobs`.
    """

    def __init__(self, *, max_rows: int, max_tokens: int, max_len: int, groups: tuple[GroupPlan, ...]) -> None:
        self._max_tokens = max_tokens
        self._max_len = max_len
        # One column more than positions: the token drawn after the last position is stored, too. Zeroed memory is
        # committed on first use, so long rows cost nothing until they are long.
        self.tokens: Ints = np.zeros((max_rows, max_len + 1), np.int32)
        self._block_sizes = tuple(group.block_size for group in groups)
        widths = [-(-max_len // size) for size in self._block_sizes]
        self._tables: list[Ints] = [np.zeros((max_rows, width), np.int32) for width in widths]

        self.temperature = np.zeros(max_rows, np.float32)
        self.top_k = np.zeros(max_rows, np.int32)
        self.top_p = np.ones(max_rows, np.float32)
        self.min_p = np.zeros(max_rows, np.float32)
        self.seed = np.zeros(max_rows, np.int64)
        self.logprobs = np.full(max_rows, -1, np.int32)

        # What a step hands to the kernels. torch owns the memory, numpy writes it through views.
        self._token_ids = torch.zeros(max_tokens, dtype=torch.int32)
        self._positions = torch.zeros(max_tokens, dtype=torch.int64)
        self._slots = [torch.zeros(max_tokens, dtype=torch.int64) for _ in groups]
        self._query_start_loc = torch.zeros(max_rows + 1, dtype=torch.int32)
        self._seq_lens = torch.zeros(max_rows, dtype=torch.int32)
        self._step_tables = [torch.zeros(max_rows, width, dtype=torch.int32) for width in widths]
        self._arange: Longs = np.arange(max(max_tokens, max_rows) + 1, dtype=np.int64)

    def start(self, row: RowStart) -> None:
        """Fill a row. What an earlier request left there is overwritten or never read."""
        self.tokens[row.row, : len(row.token_ids)] = row.token_ids
        for table, ids in zip(self._tables, row.block_ids, strict=True):
            table[row.row, : len(ids)] = ids
            table[row.row, len(ids) :] = NULL_BLOCK
        sampling = row.sampling
        self.temperature[row.row] = sampling.temperature
        self.top_k[row.row] = sampling.top_k
        self.top_p[row.row] = sampling.top_p
        self.min_p[row.row] = sampling.min_p
        # Any whole number is a seed: it is taken modulo 2^64.
        self.seed[row.row] = (sampling.seed - _LEAST_INT64) % _UINT64 + _LEAST_INT64
        self.logprobs[row.row] = sampling.logprobs

    def grow(self, blocks: RowBlocks) -> None:
        """Write block ids into a row's table."""
        self._tables[blocks.group][blocks.row, blocks.index : blocks.index + len(blocks.block_ids)] = blocks.block_ids

    def update(self, plan: StepPlan) -> None:
        """Apply a plan's starts, then its growth."""
        for row in plan.starts:
            self.start(row)
        for blocks in plan.grown:
            self.grow(blocks)

    def apply(self, plan: StepPlan) -> tuple[ForwardBatch, SamplingRows]:
        """Bring the rows up to date and describe the step, which has at least one chunk.

        The result's tensors are valid until the next call.
        """
        self.update(plan)
        columns: Longs = np.array([chunk[:4] for chunk in plan.chunks], np.int64).T
        rows, starts, counts, draws = columns
        num_rows, num_tokens = len(rows), int(counts.sum())
        assert num_tokens == plan.num_tokens <= self._max_tokens, (plan.step, num_tokens, plan.num_tokens)

        ends = starts + counts
        max_seq_len, max_query_len = int(ends.max()), int(counts.max())
        assert max_seq_len <= self._max_len, (plan.step, max_seq_len, self._max_len)
        last = np.cumsum(counts)
        self._query_start_loc.numpy()[1 : num_rows + 1] = last
        self._seq_lens.numpy()[:num_rows] = ends

        positions: Longs = self._positions.numpy()[:num_tokens]
        if max_query_len == 1:
            token_rows = rows
            positions[:] = starts
        else:
            token_rows = np.repeat(rows, counts)
            np.add(self._arange[:num_tokens], np.repeat(starts - (last - counts), counts), out=positions)
        self._token_ids.numpy()[:num_tokens] = self.tokens[token_rows, positions]

        groups = tuple(
            self._group(number, rows, token_rows, positions, max_seq_len) for number in range(len(self._tables))
        )
        drawing = draws > 0
        batch = ForwardBatch(
            token_ids=self._token_ids[:num_tokens],
            positions=self._positions[:num_tokens],
            query_start_loc=self._query_start_loc[: num_rows + 1],
            seq_lens=self._seq_lens[:num_rows],
            groups=groups,
            logit_rows=torch.from_numpy((last - 1)[drawing]),
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )
        return batch, SamplingRows(rows=rows[drawing], positions=ends[drawing])

    def _group(self, number: int, rows: Longs, token_rows: Longs, positions: Longs, max_seq_len: int) -> GroupBatch:
        table, size = self._tables[number], self._block_sizes[number]
        width = -(-max_seq_len // size)
        step_table = self._step_tables[number][: len(rows), :width]
        step_table.numpy()[:] = table[rows, :width]
        slots: Longs = self._slots[number].numpy()[: len(positions)]
        block_ids = table[token_rows, positions // size].astype(np.int64)
        np.multiply(block_ids, size, out=slots)
        slots += positions % size
        # A sliding window may have passed a token's block within its own chunk: the null block is never written.
        slots[block_ids == NULL_BLOCK] = -1
        return GroupBatch(step_table, self._slots[number][: len(positions)])

    def store(self, drawn: SamplingRows, token_ids: Longs) -> None:
        """Keep drawn tokens as the rows' next inputs: the next step may start there before anybody has seen them."""
        self.tokens[drawn.rows, drawn.positions] = token_ids
