"""Gated activations on a GPU: a program takes a piece of a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus_kernels.device import power_of_two

_PIECE = 1024
_WARPS = 4


@triton.jit
def _gated(out, x, width, out_row, x_row, PIECE: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = column < width
    source = x + row * x_row + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # g (1 + tanh(a)) / 2 = g / (1 + exp(-2 a)), a = sqrt(2 / π) (g + 0.044715 g³)
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        slope = gate
    result = gate / (1.0 + tl.exp(-slope)) * up
    tl.store(out + row * out_row + column, result.to(out.dtype.element_ty), mask=inside)


def _run(x: Tensor, out: Tensor | None, gelu: bool) -> Tensor:
    if x.dim() != 2 or x.shape[1] % 2 or x.stride(1) != 1:
        raise ValueError(f"x: expected [T, 2 I] with contiguous rows, got shape {tuple(x.shape)}")
    rows, width = x.shape[0], x.shape[1] // 2
    if out is None:
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    elif out.shape != (rows, width) or out.dtype != x.dtype or out.stride(1) != 1:
        raise ValueError(f"out: expected {x.dtype} {(rows, width)}, got {out.dtype} {tuple(out.shape)}")
    if rows == 0 or width == 0:
        return out
    piece = min(_PIECE, power_of_two(width))
    _gated[(rows, triton.cdiv(width, piece))](
        out,
        x,
        width,
        out.stride(0),
        x.stride(0),
        PIECE=piece,
        GELU=gelu,
        num_warps=_WARPS,
    )
    return out


def silu_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Same contract as `reference.silu_mul`."""
    return _run(x, out, False)


def gelu_tanh_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Same contract as `reference.gelu_tanh_mul`."""
    return _run(x, out, True)
