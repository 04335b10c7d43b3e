"""Weights as 8-bit floats, for a device that multiplies them: as a checkpoint holds them, or rounded at load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.base import TensorSource
from ..models.shard import Slice
from .quantized import Expanded

Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A matrix [N, K] as E4M3 and fp32 scales of its rows: `isthmus_kernels.dispatch_weights.quantize`."""
_MULTIPLE = 16
"""Of both sides of a matrix that the kernels multiply."""


@dataclass(frozen=True, slots=True)
class _Matrix:
    weight: Tensor
    scale: Tensor
    kept: bool
    """As it was stored."""


class Fp8Weights:
    """`models.base.ScaledSource` over another source."""

    def __init__(self, source: TensorSource, quantize: Quantize | None) -> None:
        """`quantize` rounds the matrices that are not stored as 8-bit floats; None: they stay."""
        self._source = source
        self._quantize = quantize
        self.kept, self.rounded, self.left = 0, 0, 0
        """Matrices so far: as they were stored, rounded here, and not made of 8-bit floats."""

    def take(self, *parts: str | Slice) -> Tensor:
        """The weights joined along their first dimension, in no smaller a dtype than they would have without this."""
        return self._source.take(*parts)

    def scaled(self, *parts: str | Slice) -> tuple[Tensor, Tensor] | None:
        """The matrices joined along their rows and their rows' scales. None where one is not to be rounded, or where a
        side does not fit the kernels."""
        found = [part for part in map(self._one, parts) if part is not None]
        if len(found) < len(parts):
            self.left += len(parts)
            return None
        kept = sum(part.kept for part in found)
        self.kept += kept
        self.rounded += len(parts) - kept
        # By bytes: few operations know 8-bit floats.
        weight = torch.cat([part.weight.view(torch.uint8) for part in found]).view(torch.float8_e4m3fn)
        return weight, torch.cat([part.scale for part in found])

    def _one(self, part: str | Slice) -> _Matrix | None:
        stored = self._source.as_fp8(part) if isinstance(self._source, Expanded) else None
        if stored is not None:
            weight, scale = stored
        elif self._quantize is not None:
            weight, scale = self._quantize(self._source.take(part))
        else:
            return None
        fits = all(side % _MULTIPLE == 0 for side in weight.shape)
        return _Matrix(weight, scale, kept=stored is not None) if fits else None
