"""The persistent input batch: one row per running request, kept up to date by differences.

Block tables (`block_tables`) and what is drawn (`draws`) are rows on the host; the tokens are a table on the device,
where a step finds what the one before it drew without anybody having seen it. A step is described by a fixed number of
numpy calls, whatever the number of requests, into the staging slot of that step; every buffer is made once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..interfaces.steps import AdapterSlot, LateRowMask, RowStart, StepPlan
from ..kv.groups import GroupPlan
from ..layers.batch import ForwardBatch, GroupBatch, ReadBatch
from ..models.pooling import Pooling
from .block_tables import BlockTables
from .device.base import Device
from .draws import DrawRows, Draws
from .graphs import Graphs, StepShape
from .pooling import PooledChunk, PooledRows
from .prompt_scores import ScoredChunk, ScoredRows
from .staging import Packer, StagingSlot

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
# Per row and step: tokens, slots and draws, with room for the roundings of `Packer`.
_WORDS_PER_ROW, _WORDS_PER_DRAW, _WORDS_PER_READ = 16, 8, 3
_WORDS_PER_ANSWER = 1 + 20 + 10 + 1
"""A log-probability, and ids and log-probabilities of 20 alternatives: the most that the OpenAI API has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """One step, ready to be launched."""

    starts: tuple[tuple[Tensor, Tensor], ...]
    """Row of the token table, staged tokens."""
    words: int
    """How much of the slot's inputs goes to the device."""
    tables: tuple[tuple[Tensor, Tensor], ...]
    """Block tables that the kernels read, and where the upload has them."""
    sources: Tensor | None
    """int64 [T]: where in the token table each token of the step is; None: nothing is computed."""
    forward: ForwardBatch | None
    graph: tuple[str, int] | None
    """Name and size of the captured forward pass; None: there is none."""
    draws: Draws | None
    adapters: tuple[AdapterSlot, ...] = ()
    """To be put into their slots before anything else."""
    scored: tuple[ScoredChunk, ...] = ()
    """Parts of prompts whose log-probabilities are wanted."""
    pooled: tuple[PooledChunk, ...] = ()
    """Chunks of prompts whose vectors are wanted."""
    read: ReadBatch | None = None
    """The tokens that the last layer is computed for, and what draws and scores number; None: those of the step."""


class InputBatch:
    """State of all rows, and the device's buffers that steps are described in."""

    def __init__(
        self,
        device: Device,
        graphs: Graphs,
        *,
        max_rows: int,
        max_tokens: int,
        max_len: int,
        groups: tuple[GroupPlan, ...],
        slots: int,
        pooling: Pooling | None = None,
        adapters: bool = False,
    ) -> None:
        """`slots`: most steps in flight; `pooling`: how prompts become embeddings; `adapters`: if there are any."""
        self._graphs = graphs
        self.max_rows = max_rows
        self._max_tokens = max_tokens
        self._max_len = max_len
        self._adapters: Ints | None = np.zeros(max_rows, np.int32) if adapters else None
        self._scored = ScoredRows()
        self._pooled = PooledRows(pooling or Pooling())

        most_rows = graphs.most_rows
        most_tokens = max(max_tokens, most_rows)
        self._tables = [
            BlockTables(device, group, max_rows=max_rows, most_rows=most_rows, max_len=max_len) for group in groups
        ]
        # One column more than positions: the token drawn after the last position is stored, too. One row more than
        # rows: what dummy rows draw.
        self._stride = max_len + 1
        self._dummy = max_rows * self._stride
        self.tokens = device.zeros(max_rows + 1, self._stride, dtype=torch.int32)
        """int32 [rows + 1, max_len + 1], on the device."""
        self.token_ids = device.zeros(most_tokens, dtype=torch.int32)
        """The inputs of the step that runs."""
        per_token = 3 + len(groups) + _WORDS_PER_DRAW + _WORDS_PER_READ
        words = most_tokens * per_token + most_rows * (_WORDS_PER_ROW + sum(table.width for table in self._tables)) + 64
        self.uploaded = device.zeros(words, dtype=torch.int64)
        """What the step that runs took to the device."""
        self._packer = Packer(self.uploaded)
        # Whole prompts are staged when they begin, also the last one, of which the step has room for the first token.
        prompts = most_tokens + max_len
        self.slots = [
            StagingSlot(
                device, capacity=words, max_draws=most_tokens, prompts=prompts, answers=max_rows * _WORDS_PER_ANSWER
            )
            for _ in range(slots)
        ]
        self._arange: Longs = np.arange(most_tokens + 1, dtype=np.int64)
        # Drafts may make a row of a step draw as often as it has tokens.
        self._draws = DrawRows(max_rows, stride=self._stride, most=most_tokens + 1)

    def update(self, plan: StepPlan, slot: StagingSlot) -> tuple[tuple[Tensor, Tensor], ...]:
        """Apply a plan's starts, then its growth; the tokens to copy to the device's table, drafts among them."""
        staged = [self._start(start, slot) for start in plan.starts]
        for blocks in plan.grown:
            self._tables[blocks.group].grow(blocks)
        for row, start, count, draws, drafts in plan.chunks:
            if draws > 1:
                end = start + count
                staged.append((self.tokens[row, end - len(drafts) : end], slot.tokens(drafts)))
        return tuple(staged)

    def build(self, plan: StepPlan, slot: StagingSlot) -> StepInputs:
        """Bring the rows up to date and describe the step in `slot`, whose last step is done."""
        slot.reset()
        starts = self.update(plan, slot)
        if not plan.chunks:
            return StepInputs(
                starts=starts,
                words=0,
                tables=(),
                sources=None,
                forward=None,
                graph=None,
                draws=None,
                adapters=plan.adapters,
            )
        columns: Longs = np.array([chunk[:4] for chunk in plan.chunks], np.int64).T
        num_tokens = int(columns[2].sum())
        assert num_tokens == plan.num_tokens <= self._max_tokens, (plan.step, num_tokens, plan.num_tokens)
        longest = int((columns[1] + columns[2]).max())
        assert longest <= self._max_len, (plan.step, longest, self._max_len)
        masks = {mask.row: mask.allowed for mask in plan.masks}
        return self._describe(
            columns,
            slot,
            starts,
            loads=plan.adapters,
            masks=masks,
            late_masks={late.row: late for late in plan.late_masks},
        )

    def dummies(self, size: int, slot: StagingSlot, *, prompts: bool = False, adapters: bool = False) -> StepInputs:
        """A step of dummies alone, to capture a graph with: `size` rows, or with `prompts` as many tokens. `adapters`:
        one for steps some of whose rows have adapters."""
        slot.reset()
        return self._describe(np.zeros((4, 0), np.int64), slot, (), size=size, prompts=prompts, adapted=adapters)

    def _describe(
        self,
        columns: Longs,
        slot: StagingSlot,
        starts: tuple[tuple[Tensor, Tensor], ...],
        *,
        size: int = 0,
        prompts: bool = False,
        adapted: bool = False,
        loads: tuple[AdapterSlot, ...] = (),
        masks: Mapping[int, tuple[bytes, ...]] = MappingProxyType({}),
        late_masks: Mapping[int, LateRowMask] = MappingProxyType({}),
    ) -> StepInputs:
        rows, begins, counts, draws = columns
        ends = begins + counts
        width = int(ends.max(initial=1))
        shape = self._graphs.shape(
            len(rows), int(counts.sum()), int(counts.max(initial=1)), width, size=size, prompts=prompts
        )
        decode, num_rows, num_tokens, most, longest, graph = shape
        pack = self._packer
        pack.begin(slot)

        last = np.cumsum(counts)
        positions, positions_there = pack.take(num_tokens, torch.int64)
        token_rows, sources_there = self._take_tokens(rows, begins, counts, last, positions, decode)
        real = len(token_rows)
        slots = [table.slots(pack, token_rows, positions[:real], num_tokens) for table in self._tables]
        starts_there, lengths_there = self._take_bounds(ends, last, real, shape)
        adapters, slots_of = self._adapters_of(token_rows, num_tokens, adapted)
        if adapters is not None and graph is not None:
            graph = (f"{graph[0]} with adapters", graph[1])
        scored, pooled = self._scored.of(columns), self._pooled.of(columns)
        reads = draws.copy()
        for part in scored:
            reads[part.chunk] = counts[part.chunk]
        for chunk in pooled:
            reads[chunk.chunk] = chunk.reads
        # Two products in place of one have to pay. What was captured ahead is cut short always or never.
        short = not decode and (2 * reads.sum() <= num_tokens or (graph is not None and bool(self._graphs.sizes)))
        if not short:
            reads = counts
            if graph is not None and not decode:
                graph = (f"{graph[0]} whose tokens are all read", graph[1])
        read_last = np.cumsum(reads)
        drawn = self._draws.of(pack, rows, ends, read_last, draws, masks, late_masks, num_rows if decode else 0)
        # Rows without tokens beside the step's own are many where nothing else is padded, and are not read.
        read_rows = num_rows if decode or self._graphs.sizes else len(rows)
        tables = [table.of(pack, rows, width, num_rows, read_rows) for table in self._tables]
        forward = ForwardBatch(
            token_ids=self.token_ids[:num_tokens],
            positions=positions_there,
            query_start_loc=starts_there,
            seq_lens=lengths_there,
            groups=tuple(GroupBatch(table.kernels, where) for table, where in zip(tables, slots, strict=True)),
            max_query_len=most,
            max_seq_len=longest,
            adapters=adapters,
        )
        pooled = tuple(chunk._replace(end=int(read_last[chunk.chunk])) for chunk in pooled)
        read = None
        if short:
            tokens = self._arange[: read_last[-1] if len(rows) else 0] + np.repeat(last - read_last, reads)
            read = self._read(forward, tokens, positions[tokens], reads, read_last, slots_of)
            scored = tuple(part._replace(first=int(read_last[part.chunk] - reads[part.chunk])) for part in scored)
        return StepInputs(
            starts=starts,
            words=pack.words,
            tables=tuple((table.target, table.source) for table in tables),
            sources=sources_there,
            forward=forward,
            read=read,
            graph=graph,
            draws=drawn,
            adapters=loads,
            scored=scored,
            pooled=pooled,
        )

    def _take_tokens(
        self, rows: Longs, begins: Longs, counts: Longs, last: Longs, positions: Longs, decode: bool
    ) -> tuple[Longs, Tensor]:
        """Fill in `positions` of all tokens; the row of each token that is no dummy, and where in the token table each
        is, on the device."""
        sources, there = self._packer.take(len(positions), torch.int64)
        if decode:
            token_rows, real = rows, len(rows)
            positions[:real] = begins
        else:
            token_rows = np.repeat(rows, counts)
            real = len(token_rows)
            np.add(self._arange[:real], np.repeat(begins - (last - counts), counts), out=positions[:real])
        positions[real:] = 0
        sources[:real] = token_rows * self._stride + positions[:real]
        sources[real:] = self._dummy
        return token_rows, there

    def _take_bounds(self, ends: Longs, last: Longs, real: int, shape: StepShape) -> tuple[Tensor, Tensor]:
        """Where each row's tokens begin, `real` of which are no dummies, and each row's length; on the device."""
        rows = len(ends)
        starts, starts_there = self._packer.take(shape.rows + 1, torch.int32)
        starts[0] = 0
        starts[1 : rows + 1] = last
        starts[rows + 1 :] = self._arange[rows + 1 : shape.rows + 1] if shape.decode else real
        lengths, lengths_there = self._packer.take(shape.rows, torch.int32)
        lengths[:rows] = ends
        lengths[rows:] = 1 if shape.decode else 0
        return starts_there, lengths_there

    def _read(
        self,
        forward: ForwardBatch,
        tokens: Longs,
        positions: Longs,
        reads: Longs,
        last: Longs,
        adapters: Ints | None,
    ) -> ReadBatch:
        """The step's `tokens` at `positions`: of request r the last `reads[r]`, which end before `last[r]`. `adapters`:
        slots of all tokens of the step."""
        own: Tensor | None = None
        if adapters is not None:
            own_here, own = self._packer.take(len(tokens), torch.int32)
            own_here[:] = adapters[tokens]
        tokens_here, tokens_there = self._packer.take(len(tokens), torch.int64)
        positions_here, positions_there = self._packer.take(len(tokens), torch.int64)
        slots_here, slots_there = self._packer.take(len(tokens), torch.int64)
        starts_here, starts_there = self._packer.take(len(forward.query_start_loc), torch.int32)
        tokens_here[:], positions_here[:], slots_here[:] = tokens, positions, -1
        starts_here[0], starts_here[1 : len(last) + 1], starts_here[len(last) + 1 :] = 0, last, len(tokens)
        return ReadBatch(
            tokens=tokens_there,
            positions=positions_there,
            query_start_loc=starts_there,
            seq_lens=forward.seq_lens,
            groups=tuple(GroupBatch(group.block_tables, slots_there) for group in forward.groups),
            max_query_len=int(reads.max(initial=0)),
            max_seq_len=forward.max_seq_len,
            adapters=own,
        )

    def _adapters_of(self, token_rows: Longs, num_tokens: int, wanted: bool) -> tuple[Tensor | None, Ints | None]:
        """The slot of each token's adapter, on the device and here; None where no token has one, unless it is `wanted`
        all the same."""
        if self._adapters is None:
            return None, None
        # Taken in any case: what follows lies where it lies in the other steps of its size.
        here, there = self._packer.take(num_tokens, torch.int32)
        np.take(self._adapters, token_rows, out=here[: len(token_rows)])
        here[len(token_rows) :] = 0
        return (there, here) if wanted or here.any() else (None, None)

    def _start(self, row: RowStart, slot: StagingSlot) -> tuple[Tensor, Tensor]:
        """Fill a row. What an earlier request left there is overwritten or never read."""
        for table, ids in zip(self._tables, row.block_ids, strict=True):
            table.start(row.row, ids)
        if self._adapters is not None:
            self._adapters[row.row] = row.adapter
        else:
            assert not row.adapter, "this executor was made without adapters"
        self._draws.set(row)
        self._scored.set(row)
        self._pooled.set(row)
        return self.tokens[row.row, : len(row.token_ids)], slot.tokens(row.token_ids)
