"""Definition of sums over ranks, for the parts of all ranks in one place."""

from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus_kernels.rms_norm import reference


def peer_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum of the ranks' `parts` ``[T, H]``, added in the order of ranks in fp32 and rounded once."""
    return _sum(parts).to(parts[0].dtype)


def peer_sum_add_rms_norm(parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Set ``residual += sum(parts)`` in place, rounded once, then return the RMSNorm of the stored residual."""
    residual.copy_(_sum(parts) + residual.float())
    return reference.rms_norm(residual, weight, eps)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    first, *others = (part.to(torch.float32) for part in parts)
    for part in others:
        first = first + part
    return first
