"""Random weights in place of a checkpoint's, for benchmarks of models that have not been downloaded."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from ..models.shard import Slice


class RandomTensors:
    """A `models.base.TensorSource` of tensors that are made where they are wanted.

    Each tensor follows from the seed, its name, its shape and the device's kind alone. Matrices keep the size of what
    goes through them (normal, variance 1 / columns) and norms are ones, so that states stay finite through any number
    of layers; biases are zeros.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], *, seed: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """`shapes`: as `ModelSpec.tensor_shapes` gives them."""
        self._shapes = shapes
        self._seed = seed
        self._device = device
        self._dtype = dtype

    def take(self, *parts: str | Slice) -> Tensor:
        """The tensors, or slices of them, joined along their first dimension."""
        made = [part.cut(self._make(part.name)) if isinstance(part, Slice) else self._make(part) for part in parts]
        return made[0] if len(made) == 1 else torch.cat(made)

    def _make(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            fill = 0.0 if name.endswith(".bias") else 1.0
            return torch.full(shape, fill, device=self._device, dtype=self._dtype)
        generator = torch.Generator(self._device).manual_seed(self._seed ^ zlib.crc32(name.encode()))
        made = torch.randn(shape, generator=generator, device=self._device, dtype=self._dtype)
        return made.mul_(shape[-1] ** -0.5)
