"""Draws the next tokens of a batch from its logits, and brings them to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus_kernels import dispatch

from ..interfaces.steps import RowOutput
from ..request import TokenLogprobs
from .device.base import Device
from .input_batch import Draws
from .staging import StagingSlot


def sample(logits: Tensor, draws: Draws, out: Tensor) -> Tensor:
    """One token id per row of `logits` [S, V] into `out` int64 [S].

    A draw depends on the logits and on (seed, position) alone, so that a recompute or another machine draws alike.
    Filters that no row uses are not computed.
    """
    return dispatch.sample(logits, **draws.parameters, out=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedLogprobs:
    """Log-probabilities on their way to the host: of A asking rows, N alternatives each."""

    own: Tensor
    """fp32 [A]."""
    ids: Tensor
    """int64 [A, N]."""
    best: Tensor
    """fp32 [A, N]."""


def stage_logprobs(device: Device, logits: Tensor, chosen: Tensor, draws: Draws) -> StagedLogprobs | None:
    """Within a body: compute what rows asked for and copy it to staging; None when none did."""
    if draws.asking_rows is None:
        return None
    index = draws.asking_rows
    most = min(int(draws.wanted.max()), logits.shape[1])
    own, _rank, ids, best = dispatch.logprobs(logits[index], chosen[index], most)
    staged = StagedLogprobs(
        own=device.staging(*own.shape, dtype=torch.float32),
        ids=device.staging(*ids.shape, dtype=torch.int64),
        best=device.staging(*best.shape, dtype=torch.float32),
    )
    for target, source in ((staged.own, own), (staged.ids, ids), (staged.best, best)):
        device.copy(target, source)
    return staged


def outputs(draws: Draws, slot: StagingSlot, staged: StagedLogprobs | None) -> list[RowOutput]:
    """What each drawing row drew, in order; only once the step is done."""
    tokens: list[int] = slot.drawn[: draws.count].tolist()
    found = [RowOutput((token,)) for token in tokens]
    if staged is None:
        return found
    rows = zip(
        draws.asking.tolist(),
        draws.wanted.tolist(),
        staged.own.tolist(),
        staged.ids.tolist(),
        staged.best.tolist(),
        strict=True,
    )
    for at, count, logprob, ids, best in rows:
        top = tuple(zip(ids[:count], best[:count], strict=True))
        found[at] = RowOutput((tokens[at],), (TokenLogprobs(tokens[at], logprob, top),))
    return found
