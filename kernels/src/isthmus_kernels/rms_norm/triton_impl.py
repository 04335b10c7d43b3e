"""RMSNorm on a GPU: one program a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus_kernels.device import power_of_two


@triton.jit
def _rms_norm(
    out,
    x,
    residual,
    weight,
    eps,
    out_row,
    x_row,
    x_part,
    residual_row,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_PAD)
    inside = column < WIDTH
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(x + part * x_part + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        spot = residual + row * residual_row + column
        stored = (value + tl.load(spot, mask=inside, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(spot, stored, mask=inside)
        # What is normed is the residual as stored, so that it can be recomputed from it.
        value = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    tl.store(out + row * out_row + column, (value * scale * factor).to(out.dtype.element_ty), mask=inside)


def _run(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"x: expected [T, H] with contiguous rows, got shape {tuple(x.shape)}")
    if weight.shape != x.shape[1:] or not weight.is_contiguous():
        raise ValueError(f"weight: expected a contiguous [{x.shape[1]}], got shape {tuple(weight.shape)}")
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for name, other in (("out", out), ("residual", residual)):
        if other is not None and (other.shape != x.shape or other.dtype != x.dtype or other.stride(1) != 1):
            raise ValueError(f"{name}: expected {x.dtype} {tuple(x.shape)}, got {other.dtype} {tuple(other.shape)}")
    if x.shape[0] == 0:
        return out
    _launch(x[None], residual, weight, eps, out)
    return out


def _launch(parts: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    count, rows, width = parts.shape
    width_pad = power_of_two(width)
    _rms_norm[(rows,)](
        out,
        parts,
        parts if residual is None else residual,
        weight,
        eps,
        out.stride(0),
        parts.stride(1),
        parts.stride(0) if count > 1 else 0,
        0 if residual is None else residual.stride(0),
        PARTS=count,
        WIDTH=width,
        WIDTH_PAD=width_pad,
        ADD=residual is not None,
        num_warps=min(16, max(1, width_pad // 512)),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Same contract as `reference.rms_norm`."""
    return _run(x, None, weight, eps, out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Same contract as `reference.add_rms_norm`."""
    return _run(x, residual, weight, eps, out)


def add_parts_rms_norm(parts: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Set ``residual += sum(parts)`` in place, rounded once, and write its RMSNorm to `out`.

    `parts` is fp32 ``[P, T, H]``: the sums over P parts of a product's columns; they are added in order.
    """
    assert (
        parts.shape[1:] == residual.shape == out.shape and parts.stride(2) == residual.stride(1) == out.stride(1) == 1
    )
    _launch(parts, residual, weight, eps, out)
