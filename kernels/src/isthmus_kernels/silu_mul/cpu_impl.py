"""Gated activations on CPU through the compiled library (cpu/silu_mul.cpp)."""

import torch
from torch import Tensor

from isthmus_kernels import native


def _run(op: str, x: Tensor, out: Tensor | None) -> Tensor:
    if x.dim() != 2 or x.shape[1] % 2 or x.stride(1) != 1:
        raise ValueError(f"x: expected [T, 2 I] with contiguous rows, got shape {tuple(x.shape)}")
    rows, width = x.shape[0], x.shape[1] // 2
    if out is None:
        out = torch.empty((rows, width), dtype=x.dtype)
    elif out.shape != (rows, width) or out.dtype != x.dtype or out.stride(1) != 1:
        raise ValueError(f"out: expected {x.dtype} [{rows}, {width}], got {out.dtype} {tuple(out.shape)}")
    native.entry(op, "7q")(
        (out, x),
        out.data_ptr(),
        x.data_ptr(),
        rows,
        width,
        out.stride(0),
        x.stride(0),
        native.dtype_code(x.dtype, "x"),
    )
    return out


def silu_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Same contract as `reference.silu_mul`."""
    return _run("silu_mul", x, out)


def gelu_tanh_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Same contract as `reference.gelu_tanh_mul`."""
    return _run("gelu_tanh_mul", x, out)
