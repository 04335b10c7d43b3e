"""A weight prepared once for many products."""

from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus_kernels.linear import cpu_impl, torch_impl

Weight = cpu_impl.PanelWeight | torch_impl.PlainWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear:
    """The weight ``[out_features, in_features]`` and optional bias of one linear layer, ready for `linear`.

    `weight_dtype` is what is stored (bf16 weights stay bf16: they expand to fp32 without loss inside the
    product, so an fp32 run of a bf16 checkpoint reads half the bytes). `nbytes` is what is held.
    """

    in_features: int
    out_features: int
    weight_dtype: torch.dtype
    weight: Weight

    @property
    def nbytes(self) -> int:
        """Bytes held by the packed weight and bias."""
        return self.weight.nbytes

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, compiled: bool) -> "PackedLinear":
        """Prepare `weight`; see `dispatch.pack`."""
        if weight.dim() != 2:
            raise ValueError(f"weight: expected [out_features, in_features], got shape {tuple(weight.shape)}")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias: expected [{weight.shape[0]}], got shape {tuple(bias.shape)}")
        make = cpu_impl.PanelWeight.pack if compiled else torch_impl.PlainWeight.pack
        held: Weight = make(weight, bias, dtype)
        return cls(in_features=weight.shape[1], out_features=weight.shape[0], weight_dtype=weight.dtype, weight=held)
