"""A weight prepared once for many products."""

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


class Weight(Protocol):
    """A weight in the form that one implementation multiplies with."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""

    def apply(self, x: Tensor, out: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias``."""

    def outputs_from(self, first: int) -> "Weight | None":
        """The outputs from `first` on, in the same memory; None where this form cannot be cut there."""


@runtime_checkable
class GatedWeight(Weight, Protocol):
    """A weight of joined gates and values, gates first, that can apply the gated activation within the product."""

    def apply_silu_mul(self, x: Tensor, out: Tensor) -> bool:
        """Write ``silu(g) * u`` of the halves g, u of ``x @ weight.T`` to `out`; False where the caller has to."""


@runtime_checkable
class SummingWeight(Weight, Protocol):
    """A weight that can add its products to the residual stream as it makes them."""

    def apply_add_rms_norm(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float, out: Tensor) -> bool:
        """``residual += x @ weight.T``, its RMSNorm with the weight `norm` to `out`; False where the caller has to."""


@runtime_checkable
class PartedWeight(Weight, Protocol):
    """A weight whose products are made in parts where that is faster for whoever adds several anyway."""

    def apply_parts(self, x: Tensor) -> Tensor | None:
        """fp32 ``[P, T, out]``, whose sum over P is ``x @ weight.T``, in memory that the next such product overwrites.
        None: one product is faster, or has to be."""


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

    def outputs_from(self, first: int) -> "PackedLinear | None":
        """The layer of the outputs from `first` on, in the same memory; None where its form cannot be cut there."""
        weight = self.weight.outputs_from(first)
        return None if weight is None else replace(self, out_features=self.out_features - first, weight=weight)
