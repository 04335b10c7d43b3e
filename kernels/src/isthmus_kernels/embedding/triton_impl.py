"""Embedding on a GPU: a program takes a piece of one row. A row whose id is outside the table becomes NaN."""

import triton
import triton.language as tl
from torch import Tensor

from isthmus_kernels.device import power_of_two

_PIECE = 1024


@triton.jit
def _embedding(out, table, ids, scale, count, width, out_row, table_row, PIECE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    index = tl.load(ids + token).to(tl.int64)
    column = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = column < width
    known = (index >= 0) & (index < count)
    row = tl.load(table + index * table_row + column, mask=inside & known, other=float("nan")).to(tl.float32)
    tl.store(out + token * out_row + column, (row * scale).to(out.dtype.element_ty), mask=inside)


def embedding(table: Tensor, ids: Tensor, *, scale: float = 1.0, out: Tensor) -> Tensor:
    """Same contract as `reference.embedding`."""
    if table.dim() != 2 or table.stride(1) != 1:
        raise ValueError(f"table: expected [V, H] with contiguous rows, got shape {tuple(table.shape)}")
    if out.shape != (ids.shape[0], table.shape[1]) or out.stride(1) != 1:
        raise ValueError(f"out: expected [{ids.shape[0]}, {table.shape[1]}], got {tuple(out.shape)}")
    tokens, width = out.shape
    if tokens == 0:
        return out
    piece = min(_PIECE, power_of_two(width))
    _embedding[(tokens, triton.cdiv(width, piece))](
        out,
        table,
        ids,
        scale,
        table.shape[0],
        width,
        out.stride(0),
        table.stride(0),
        PIECE=piece,
        num_warps=4,
    )
    return out
