"""Draws the next tokens of a batch from its logits, and brings them to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf

import torch
from torch import Tensor

from isthmus_kernels import dispatch_logits

from ..interfaces.steps import RowOutput
from ..request import TokenLogprobs
from .device.base import Device
from .draws import Draws
from .staging import StagingSlot


def sample(logits: Tensor, draws: Draws, out: Tensor) -> Tensor:
    """Draw one token id per row of `logits` [S, V] into `out` int64 [S].

    A draw depends on the logits and on (seed, position) alone, so that a recompute or another machine draws alike.
    Filters that no row uses are not computed.
    """
    return dispatch_logits.sample(logits, **draws.parameters, out=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedLogprobs:
    """Log-probabilities on their way to the host: of A asking rows, N alternatives each."""

    own: Tensor
    """fp32 [A]."""
    ids: Tensor
    """int64 [A, N]."""
    best: Tensor
    """fp32 [A, N]."""


def stage_logprobs(
    device: Device, slot: StagingSlot, logits: Tensor, chosen: Tensor, draws: Draws
) -> StagedLogprobs | None:
    """Within a body: compute what rows asked for and copy it to the step's `slot`; None when none did."""
    if draws.asking_rows is None:
        return None
    index = draws.asking_rows
    most = min(int(draws.wanted.max()), logits.shape[1])
    own, _rank, ids, best = dispatch_logits.logprobs(logits[index], chosen[index], most)
    staged = StagedLogprobs(
        own=slot.answer(*own.shape, dtype=torch.float32),
        ids=slot.answer(*ids.shape, dtype=torch.int64),
        best=slot.answer(*best.shape, dtype=torch.float32),
    )
    for target, source in ((staged.own, own), (staged.ids, ids), (staged.best, best)):
        device.copy(target, source)
    return staged


def verified(drafts: Sequence[int], drawn: Sequence[RowOutput]) -> RowOutput:
    """What a chunk with drafts drew, of one draw more than there are drafts: up to the first that differs from its
    draft, or all.

    Each draw is what the row would have drawn there without drafts, noise included. That is the rejection sampling of
    arXiv:2211.17192 for drafts that are certain of one token: it is kept with the probability that the model gives it,
    and else the draw is from what is left.
    """
    right = next((at for at, draft in enumerate(drafts) if drawn[at].tokens[0] != draft), len(drafts))
    kept = drawn[: right + 1]
    return RowOutput(
        tuple(chain.from_iterable(each.tokens for each in kept)),
        tuple(chain.from_iterable(each.logprobs for each in kept)),
    )


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
        # What a mask has left may be fewer than were asked for: the rest of the best are some that it forbids.
        top = tuple(pair for pair in zip(ids[:count], best[:count], strict=True) if pair[1] != -inf)
        found[at] = RowOutput((tokens[at],), (TokenLogprobs(tokens[at], logprob, top),))
    return found
