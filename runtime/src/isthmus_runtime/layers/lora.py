"""Low-rank adapters of linear layers (LoRA, Hu et al. 2021): what layers compute with, and which can have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .linear import Linear


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters in all slots of one linear layer, as `dispatch.lora` takes them: what is in a slot may change, where
    it is may not."""

    a: Tensor
    """[S, P, R, in]."""
    b: Tensor
    """[S, R, out], with the adapters' scales in it."""
    starts: tuple[int, ...]
    """First output of each of the P projections that the layer joins."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A module of the checkpoint as a linear layer computes it."""

    name: str
    """In the checkpoint, without `.weight`."""
    start: int
    """Its first output in the layer."""
    outputs: Callable[[Tensor], Tensor] | None = None
    """Of a matrix of all its outputs [out, r] those that the layer computes, in the layer's order; None: as it is."""


@dataclass(frozen=True, slots=True)
class Adaptable:
    """A linear layer that can have adapters."""

    linear: Linear
    projections: tuple[Projection, ...]
    """What it joins, in the order of its outputs."""
    inputs: tuple[int, int] | None = None
    """Of the projection's inputs the layer has [start, stop): its product is a summand of the whole one. None: all."""
