"""Which linear layers can have low-rank adapters, and what of a checkpoint they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .linear import Linear


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
