"""RMSNorm, alone or fused with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus_kernels import dispatch


class RmsNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (Zhang & Sennrich 2019)."""

    __slots__ = ("_eps", "weight")

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        self.weight = weight.to(dtype).contiguous()
        self._eps = eps

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Norm of x [T, H] into `out`."""
        return dispatch.rms_norm(x, self.weight, self._eps, out=out)

    def add(self, x: Tensor, residual: Tensor, out: Tensor) -> Tensor:
        """``residual += x`` in place, then its norm into `out`, which may be x."""
        return dispatch.add_rms_norm(x, residual, self.weight, self._eps, out=out)
