"""Embeddings: the states of a prompt, pooled to one vector, out of the steps that compute it.

What the model's pooling needs of a chunk is taken when the chunk is computed. Sums of states are kept in double
precision and added token by token, so that on a CPU a vector's bits do not depend on how the prompt was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..interfaces.steps import Pooled, RowStart
from ..models.pooling import Pooling, PoolingKind
from ..request import PoolingParams
from .device.base import Device
from .staging import StagingSlot

_ROWS = 64
"""States at a time."""
_LEAST_NORM = 1e-12


class PooledChunk(NamedTuple):
    """A chunk of a prompt that is pooled."""

    chunk: int
    """Its place in the plan."""
    row: int
    begins: bool
    """Whether the prompt begins with it."""
    ends: bool
    """Whether the vector is known after it."""
    reads: int
    """How many states are pooled or passed over to reach them, from the chunk's end."""
    prompt_len: int
    params: PoolingParams
    end: int = 0
    """One more than the number of its last token, among the tokens of the step that are read."""


class PooledRows:
    """Which rows' prompts are to be pooled."""

    def __init__(self, pooling: Pooling) -> None:
        self._kind = pooling.kind
        self._rows: dict[int, tuple[int, PoolingParams]] = {}

    def set(self, start: RowStart) -> None:
        """Set what the row's request asks for."""
        if start.pooling is None:
            self._rows.pop(start.row, None)
        else:
            self._rows[start.row] = start.prompt_len, start.pooling

    def of(self, columns: npt.NDArray[np.int64]) -> tuple[PooledChunk, ...]:
        """Those of a step's chunks; `columns`: rows, starts and counts."""
        if not self._rows:
            return ()
        found: list[PooledChunk] = []
        for number, (row, start, count) in enumerate(columns[:3].T.tolist()):
            if row not in self._rows:
                continue
            prompt_len, params = self._rows[row]
            begins, ends = start == 0, start + count == prompt_len
            reads = {
                PoolingKind.LAST: int(ends),
                PoolingKind.MEAN: count,
                PoolingKind.FIRST: count if begins else 0,
            }[self._kind]
            found.append(PooledChunk(number, row, begins, ends, reads, prompt_len, params))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class StagedVectors:
    """The pooled states of P prompts on their way to the host."""

    chunks: tuple[PooledChunk, ...]
    states: Tensor
    """[P, H]: fp64 of sums, or fp32 of single states."""
    pooling: Pooling

    def read(self) -> tuple[Pooled, ...]:
        """The vectors, only once the step is done: averaged, cut and normalised."""
        found: list[Pooled] = []
        for chunk, row in zip(self.chunks, self.states, strict=True):
            vector = row.double()[: chunk.params.dimensions or None]
            if self.pooling.kind is PoolingKind.MEAN:
                vector = vector / chunk.prompt_len
            if self.pooling.normalize:
                vector = vector / vector.norm().clamp_min(_LEAST_NORM)
            found.append(Pooled(chunk.chunk, vector.float().numpy().astype("<f4").tobytes()))
        return tuple(found)


class Pooler:
    """Pools the prompts of one executor."""

    def __init__(self, device: Device, pooling: Pooling, *, max_rows: int, hidden_size: int) -> None:
        self._device = device
        self._pooling = pooling
        # What the states of a prompt whose chunks are not all computed add up to, by row.
        kept = max_rows if pooling.needs_every_state else 0
        self._sums = device.zeros(kept, hidden_size, dtype=torch.float64)
        self._hidden = hidden_size
        self._uploaded = device.zeros(max_rows, dtype=torch.int64)

    def stage(
        self, states: Callable[[Tensor], Tensor], chunks: tuple[PooledChunk, ...], slot: StagingSlot
    ) -> StagedVectors | None:
        """Within a body, after the forward pass: take what the chunks add, and copy the vectors that are known now to
        the step's `slot`. `states`: after the final norm, of tokens by their numbers (int64 [S]), which count as `end`
        does."""
        if self._pooling.needs_every_state:
            for chunk in chunks:
                self._add(states, chunk)
        ended = tuple(chunk for chunk in chunks if chunk.ends)
        if not ended:
            return None
        if self._pooling.needs_every_state:
            found = self._sums[self._numbers([chunk.row for chunk in ended], slot)]
        else:
            found = states(self._numbers([chunk.end - 1 for chunk in ended], slot)).float()
        staged = slot.answer(len(ended), self._hidden, dtype=found.dtype)
        self._device.copy(staged, found)
        return StagedVectors(ended, staged, self._pooling)

    def _add(self, states: Callable[[Tensor], Tensor], chunk: PooledChunk) -> None:
        total = self._sums[chunk.row]
        if chunk.begins:
            total.zero_()
        first = chunk.end - chunk.reads
        last = min(chunk.end, first + 1) if self._pooling.kind is PoolingKind.FIRST else chunk.end
        for begin in range(first, last, _ROWS):
            end = min(last, begin + _ROWS)
            part = states(torch.arange(begin, end, device=total.device)).double()
            total.copy_(torch.cat((total[None], part)).cumsum(0)[-1])

    def _numbers(self, numbers: Sequence[int], slot: StagingSlot) -> Tensor:
        """int64, on the device."""
        staged = slot.answer(len(numbers), dtype=torch.int64)
        staged.numpy()[:] = numbers
        there = self._uploaded[: len(numbers)]
        self._device.copy(there, staged)
        return there
