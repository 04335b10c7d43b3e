"""Log-probabilities of prompt tokens: of each, given those before it, out of the steps that compute the prompt.

A prompt's logits are as many rows as it has tokens, each as wide as the vocabulary. They are made a few rows at a time
and reduced at once, so that a chunk of any length costs no more memory than a step's draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from isthmus_kernels import dispatch_logits

from ..interfaces.steps import PromptScores, RowStart
from ..request import TokenLogprobs
from .device.base import Device
from .staging import StagingSlot

_ROWS = 64
"""Logits at a time."""


class ScoredChunk(NamedTuple):
    """The part of a chunk whose next tokens are the prompt's."""

    chunk: int
    """Its place in the plan."""
    row: int
    first: int
    """Which token of the step it begins with, or which of those that are read."""
    start: int
    """That token's position."""
    length: int
    wanted: int
    """How many alternatives."""


class ScoredRows:
    """Which rows' prompts are to be scored."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[int, int]] = {}

    def set(self, start: RowStart) -> None:
        """Set what the row's request asks for."""
        if start.prompt_logprobs < 0:
            self._rows.pop(start.row, None)
        else:
            self._rows[start.row] = start.prompt_len, start.prompt_logprobs

    def of(self, columns: npt.NDArray[np.int64]) -> tuple[ScoredChunk, ...]:
        """The parts to score of a step's chunks; `columns`: rows, starts and counts."""
        if not self._rows:
            return ()
        found: list[ScoredChunk] = []
        first = 0
        for number, (row, start, count) in enumerate(columns[:3].T.tolist()):
            prompt_len, wanted = self._rows.get(row, (0, 0))
            if (scored := min(start + count, prompt_len - 1) - start) > 0:
                found.append(ScoredChunk(number, row, first, start, scored, wanted))
            first += count
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedScores:
    """Scores of C tokens on their way to the host, N alternatives each."""

    chunk: int
    tokens: Tensor
    """int32 [C]: the prompt's."""
    own: Tensor
    """fp32 [C]."""
    ranks: Tensor
    """int64 [C]."""
    ids: Tensor
    """int64 [C, N]."""
    best: Tensor
    """fp32 [C, N]."""


def stage_scores(
    device: Device,
    slot: StagingSlot,
    logits: Callable[[Tensor], Tensor],
    tokens: Tensor,
    scored: ScoredChunk,
    vocab_size: int,
) -> StagedScores:
    """Within a body, after the forward pass: compute the scores and copy them to the step's `slot`.

    `logits`: of tokens by their numbers (int64 [S]), which count as `scored.first` does; `tokens`: the batch's table of
    tokens.
    """
    count, most = scored.length, min(scored.wanted, vocab_size)
    staged = StagedScores(
        chunk=scored.chunk,
        tokens=slot.answer(count, dtype=torch.int32),
        own=slot.answer(count, dtype=torch.float32),
        ranks=slot.answer(count, dtype=torch.int64),
        ids=slot.answer(count, most, dtype=torch.int64),
        best=slot.answer(count, most, dtype=torch.float32),
    )
    following = tokens[scored.row, scored.start + 1 : scored.start + 1 + count]
    device.copy(staged.tokens, following)
    for begin in range(0, count, _ROWS):
        end = min(count, begin + _ROWS)
        rows = torch.arange(scored.first + begin, scored.first + end, device=tokens.device)
        own, ranks, ids, best = dispatch_logits.logprobs(logits(rows), following[begin:end].long(), most)
        for target, source in ((staged.own, own), (staged.ranks, ranks), (staged.ids, ids), (staged.best, best)):
            device.copy(target[begin:end], source)
    return staged


def scores(staged: StagedScores) -> PromptScores:
    """The staged scores, only once the step is done."""
    columns = (staged.tokens, staged.own, staged.ids, staged.best, staged.ranks)
    found = [
        TokenLogprobs(token, own, tuple(zip(ids, best, strict=True)), rank)
        for token, own, ids, best, rank in zip(*(column.tolist() for column in columns), strict=True)
    ]
    return PromptScores(staged.chunk, tuple(found))
