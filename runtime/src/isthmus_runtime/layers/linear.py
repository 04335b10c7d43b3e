"""Linear layers over weights that are packed once."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus_kernels import dispatch, dispatch_weights
from isthmus_kernels.linear.packed import PackedLinear

from .lora import Adapters
from .norm import Joint


def storage_dtype(weight: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The narrowest dtype that holds `weight` for a computation in `dtype` without changing it.

    Decoding is bound by the bytes of the weights. A checkpoint made in bf16 and saved in fp32 is still bf16: kept
    so, it is read at half the cost and expands to the same fp32 numbers.
    """
    if weight.dtype == torch.bfloat16 or dtype == torch.bfloat16:
        return torch.bfloat16
    wide = weight.float()
    # The first row settles it for nearly every true fp32 weight.
    exact = all(bool((part.bfloat16().float() == part).all()) for part in (wide[:1], wide))
    return torch.bfloat16 if exact else torch.float32


class HeadLinear:
    """A product for each head: ``y_h = x_h W_h`` for x [T, heads, in]."""

    __slots__ = ("_packed", "_weight", "nbytes", "shape")

    def __init__(self, weight: Tensor) -> None:
        """`weight` [heads, in, out], in the dtype of the computation."""
        self.shape = tuple(weight.shape)
        self._weight: Tensor | None = None
        self._packed: list[PackedLinear] = []
        if weight.device.type == "cpu":
            # Head by head: the batched product of PyTorch chooses its order of additions by the number of rows.
            self._packed = [dispatch_weights.pack(one.T.contiguous(), dtype=weight.dtype) for one in weight]
            self.nbytes = sum(one.nbytes for one in self._packed)
        else:
            self._weight, self.nbytes = weight, weight.nbytes

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """x [T, heads, in] to `out` [T, heads, out]; neighbours in memory are those of the last dimension."""
        if self._weight is not None:
            return out.copy_(torch.bmm(x.transpose(0, 1), self._weight).transpose(0, 1))
        for head, packed in enumerate(self._packed):
            dispatch.linear(x[:, head], packed, out=out[:, head])
        return out


class Linear:
    """``y = x W^T + b`` for x [T, in]. Several projections of the same input are one layer with joined rows."""

    __slots__ = ("_packed", "adapters", "nbytes")

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, scale: Tensor | None = None) -> None:
        """`scale`, fp32 [out]: of the rows of a `weight` of 8-bit floats."""
        if scale is None:
            self._packed = dispatch_weights.pack(weight.to(storage_dtype(weight, dtype)), bias, dtype=dtype)
        else:
            self._packed = dispatch_weights.pack_fp8(weight, scale, bias, dtype=dtype)
        self.nbytes = self._packed.nbytes
        self.adapters: Adapters | None = None
        """What rows may have added to their products; None: nothing."""

    @property
    def shape(self) -> tuple[int, int]:
        """Out, in."""
        return self._packed.out_features, self._packed.in_features

    def __call__(self, x: Tensor, out: Tensor | None = None, slots: Tensor | None = None) -> Tensor:
        """x [T, in] to [T, out]. `slots`, int32 [T]: each row's adapter, 0 for none; None: no row has one."""
        product = dispatch.linear(x, self._packed, out=out)
        if slots is not None and self.adapters is not None:
            dispatch.lora(x, product, slots, self.adapters.a, self.adapters.b, self.adapters.starts)
        return product

    def silu_mul(self, x: Tensor, out: Tensor, scratch: Tensor | None = None) -> Tensor:
        """``silu(g) * u`` of the halves g, u of the product; x [T, in] to `out` [T, out / 2]. Scratch: [T, out]."""
        return dispatch.linear_silu_mul(x, self._packed, scratch=scratch, out=out)

    def join(self, x: Tensor, out: Tensor, joint: Joint, slots: Tensor | None = None) -> None:
        """The product x [T, in] of a branch to its joint. `out` [T, out], not x, is for what is not added."""
        norm = joint.norm
        adapted = slots is not None and self.adapters is not None
        if norm is None or not joint.direct or adapted:
            parts = dispatch.linear_parts(x, self._packed) if joint.takes_parts and not adapted else None
            joint.take(self(x, out, slots) if parts is None else parts)
        else:
            dispatch.linear_add_rms_norm(
                x, self._packed, joint.residual, norm.weight, norm.eps, scratch=out, out=joint.normed
            )

    def outputs_from(self, first: int) -> PackedLinear | None:
        """The product for the outputs from `first` on, out of the same memory; None where that cannot be cut there."""
        return self._packed.outputs_from(first)
