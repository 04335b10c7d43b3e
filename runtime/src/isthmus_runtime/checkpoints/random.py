"""Weights of the right shapes without a checkpoint: for benchmarks of architectures, and for parity between devices."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import WeightsError


class RandomWeights:
    """`models.base.TensorSource` of normally distributed numbers, made where they are wanted.

    A tensor depends on the seed and on the order of calls, not on what is done with it. The same seed gives the same
    weights on every CPU; a GPU's generator is another one.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        device: torch.device,
        dtype: torch.dtype,
        seed: int = 0,
        std: float = 0.02,
    ) -> None:
        """`std`: of all weights but those of norms, which are 1 apart from as much."""
        self._shapes = shapes
        self._dtype = dtype
        self._std = std
        self._generator = torch.Generator(device).manual_seed(seed)

    def take(self, *names: str) -> Tensor:
        """New numbers in the joined shape. WeightsError for a name that the architecture does not have."""
        unknown = [name for name in names if name not in self._shapes]
        if unknown:
            raise WeightsError(f"tensor {unknown[0]} is not part of the architecture")
        shapes = [self._shapes[name] for name in names]
        joined = torch.empty(
            (sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=self._dtype, device=self._generator.device
        ).normal_(0.0, self._std, generator=self._generator)
        return joined.add_(1.0) if names[0].endswith("norm.weight") else joined
