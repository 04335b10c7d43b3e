"""RMSNorm on CPU through the compiled library (cpu/rms_norm.cpp)."""

import torch
from torch import Tensor

from isthmus_kernels import native


def _run(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"x: expected [T, H] with contiguous rows, got shape {tuple(x.shape)}")
    if weight.shape != x.shape[1:] or not weight.is_contiguous():
        raise ValueError(f"weight: expected a contiguous [{x.shape[1]}], got shape {tuple(weight.shape)}")
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype)
    for name, other in (("out", out), ("residual", residual)):
        if other is not None and (other.shape != x.shape or other.dtype != x.dtype or other.stride(1) != 1):
            raise ValueError(f"{name}: expected {x.dtype} {tuple(x.shape)}, got {other.dtype} {tuple(other.shape)}")
    native.entry("rms_norm", "9qd2q")(
        (out, x, residual, weight),
        out.data_ptr(),
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        x.shape[0],
        x.shape[1],
        out.stride(0),
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        native.dtype_code(x.dtype, "x"),
        native.dtype_code(weight.dtype, "weight"),
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Same contract as `reference.rms_norm`."""
    return _run(x, None, weight, eps, out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Same contract as `reference.add_rms_norm`."""
    return _run(x, residual, weight, eps, out)
