"""Weights as `dispatch.linear` multiplies them, made once at load. Chosen as in `dispatch`."""

import torch
from torch import Tensor

from isthmus_kernels import native
from isthmus_kernels.linear.packed import PackedLinear, Weight
from isthmus_kernels.moe.mxfp4 import pack_mxfp4
from isthmus_kernels.selection import select

__all__ = ["pack", "pack_fp8", "pack_mxfp4", "quantize"]


def pack(
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> PackedLinear:
    """Prepare `weight` ``[N, K]`` (fp32 or bf16) for `linear`. The caller may free `weight` afterwards.

    `dtype` is that of the activations (default: the weight's). A bf16 weight for fp32 activations stays bf16
    in memory and is expanded, without loss, inside the product.
    """
    if weight.dim() != 2:
        raise ValueError(f"weight: expected [out_features, in_features], got shape {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: expected [{weight.shape[0]}], got shape {tuple(bias.shape)}")
    dtype = dtype or weight.dtype
    device = weight.device.type
    # Not oneDNN either where it is the faster one: it chooses kernels, and with them a row's bits, by the batch.
    if impl is None and device == "cpu" and not (weight.dtype in native.DTYPES and dtype in native.DTYPES):
        impl = "torch"
    held: Weight = select("pack", device, impl)(weight, bias, dtype)
    return PackedLinear(
        in_features=weight.shape[1], out_features=weight.shape[0], weight_dtype=weight.dtype, weight=held
    )


def quantize(x: Tensor, *, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """Round `x` ``[T, K]`` to E4M3, each row with a scale: what is stored, and fp32 scales ``[T]``."""
    result: tuple[Tensor, Tensor] = select("quantize", x.device.type, impl)(x)
    return result


def pack_fp8(
    weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype, impl: str | None = None
) -> PackedLinear:
    """Prepare an E4M3 `weight` ``[N, K]`` with the fp32 scales ``[N]`` of its rows for `linear`.

    `dtype` is that of the activations, which are rounded to E4M3 row by row for the product (`quantize`).
    """
    if weight.dim() != 2 or weight.dtype != torch.float8_e4m3fn:
        raise ValueError(f"weight: expected E4M3 [out_features, in_features], got {weight.dtype} {tuple(weight.shape)}")
    for name, vector in (("scale", scale), ("bias", bias)):
        if vector is not None and vector.shape != weight.shape[:1]:
            raise ValueError(f"{name}: expected [{weight.shape[0]}], got shape {tuple(vector.shape)}")
    held: Weight = select("pack_fp8", weight.device.type, impl)(weight, scale, bias, dtype)
    return PackedLinear(
        in_features=weight.shape[1], out_features=weight.shape[0], weight_dtype=weight.dtype, weight=held
    )
