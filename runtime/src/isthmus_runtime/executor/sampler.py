"""Draws the next tokens of a batch from its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from isthmus_kernels import dispatch

from ..request import TokenLogprobs
from .input_batch import InputBatch, SamplingRows


def sample(
    logits: Tensor, drawn: SamplingRows, rows: InputBatch
) -> tuple[npt.NDArray[np.int64], tuple[TokenLogprobs | None, ...]]:
    """One token per row of `logits` [S, V], and log-probabilities where a row asked (empty when none did).

    A draw depends on the logits and on (seed, position) alone, so that a recompute or another machine draws alike.
    Filters that no row uses are not computed.
    """
    temperature = rows.temperature[drawn.rows]
    if not temperature.any():
        chosen = dispatch.sample(logits)
    else:
        top_k, top_p, min_p = rows.top_k[drawn.rows], rows.top_p[drawn.rows], rows.min_p[drawn.rows]
        chosen = dispatch.sample(
            logits,
            temperature=torch.from_numpy(temperature),
            top_k=_if_used(top_k, lambda k: k > 0),
            top_p=_if_used(top_p, lambda p: p < 1),
            min_p=_if_used(min_p, lambda p: p > 0),
            seeds=torch.from_numpy(rows.seed[drawn.rows]),
            positions=torch.from_numpy(drawn.positions),
        )
    wanted = rows.logprobs[drawn.rows]
    return chosen.numpy(), _logprobs(logits, chosen, wanted) if (wanted >= 0).any() else ()


def _if_used(values: npt.NDArray[Any], used: Callable[[npt.NDArray[Any]], npt.NDArray[np.bool_]]) -> Tensor | None:
    return torch.from_numpy(values) if used(values).any() else None


def _logprobs(logits: Tensor, chosen: Tensor, wanted: npt.NDArray[np.int32]) -> tuple[TokenLogprobs | None, ...]:
    asking = np.flatnonzero(wanted >= 0)
    index = torch.from_numpy(asking)
    most = min(int(wanted.max()), logits.shape[1])
    own, _rank, ids, best = dispatch.logprobs(logits[index], chosen[index], most)
    result: list[TokenLogprobs | None] = [None] * len(wanted)
    for at, token, logprob, top_ids, top in zip(
        asking.tolist(), chosen[index].tolist(), own.tolist(), ids.tolist(), best.tolist(), strict=True
    ):
        count = int(wanted[at])
        result[at] = TokenLogprobs(token, logprob, tuple(zip(top_ids[:count], top[:count], strict=True)))
    return tuple(result)
