"""Token embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus_kernels import dispatch

from .linear import storage_dtype


class Embedding:
    """Rows of a table [V, H], times `scale` in the precision of `dtype`."""

    __slots__ = ("_scale", "_weight", "device", "nbytes")

    def __init__(self, weight: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
        self._weight = weight.to(storage_dtype(weight, dtype))
        self._scale = float(torch.tensor(scale, dtype=dtype))
        self.device = weight.device
        self.nbytes = self._weight.nbytes

    def __call__(self, token_ids: Tensor, out: Tensor) -> Tensor:
        """token_ids [T] to `out` [T, H]."""
        return dispatch.embedding(self._weight, token_ids, scale=self._scale, out=out)
