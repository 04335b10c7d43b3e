"""Low-rank adapters of linear layers (LoRA, Hu et al. 2021): what layers compute with, and which can have them."""

from __future__ import annotations

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
class Adaptable:
    """A linear layer that can have adapters."""

    linear: Linear
    modules: tuple[str, ...]
    """Names, in the checkpoint and without `.weight`, of the projections that it joins, in the order of its outputs."""
    starts: tuple[int, ...]
    """First output of each."""
