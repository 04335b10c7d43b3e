"""Low-rank adapters of a linear layer (LoRA, Hu et al. 2021), as it computes with them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
