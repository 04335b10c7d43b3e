"""Token embedding and the output projection that may share its weight."""

from __future__ import annotations

import torch
from torch import Tensor

from .linear import storage_dtype


class Embedding:
    """Rows of a table [V, H]."""

    __slots__ = ("_weight", "nbytes")

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self._weight = weight.to(storage_dtype(weight, dtype))
        self.nbytes = self._weight.nbytes

    def __call__(self, token_ids: Tensor, out: Tensor) -> Tensor:
        """token_ids [T] to `out` [T, H]."""
        if out.dtype == self._weight.dtype:
            return torch.index_select(self._weight, 0, token_ids, out=out)
        return out.copy_(torch.index_select(self._weight, 0, token_ids))
