"""Linear on a GPU where a row's result must not depend on the batch: one loop over the columns for any number of rows.

cuBLAS chooses kernels, and with them the order of additions, by the number of rows. Here every output is one
accumulator of the tensor cores that takes the columns in order, `_DEPTH` at a time. The tile's size says only which
outputs are computed beside each other.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_DEPTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Rows and outputs of a program. Both kinds are of the tensor cores' instructions for 64 rows."""

    rows: int
    outputs: int
    warps: int
    stages: int


FEW = Tile(rows=64, outputs=32, warps=4, stages=8)
MANY = Tile(rows=128, outputs=128, warps=8, stages=4)
# fp32 takes twice the memory, and is for parity with CPUs only.
_WIDE = Tile(rows=64, outputs=32, warps=4, stages=2)


@triton.jit(do_not_specialize=["rows"])
def _product(
    out,
    x,
    weight,
    bias,
    rows,
    outputs,
    columns,
    out_row,
    x_row,
    weight_row,
    M: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
):
    row = tl.program_id(0) * M + tl.arange(0, M)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    held, real = row < rows, output < outputs
    left = x + row.to(tl.int64)[:, None] * x_row
    right = weight + output.to(tl.int64)[None, :] * weight_row
    acc = tl.zeros([M, OUTPUTS], tl.float32)
    for base in range(0, columns, DEPTH):
        column = base + tl.arange(0, DEPTH)
        if EVEN:
            value = tl.load(left + column[None, :], mask=held[:, None], other=0.0)
            factor = tl.load(right + column[:, None], mask=real[None, :], other=0.0)
        else:
            value = tl.load(left + column[None, :], mask=held[:, None] & (column < columns)[None, :], other=0.0)
            factor = tl.load(right + column[:, None], mask=real[None, :] & (column < columns)[:, None], other=0.0)
        acc = tl.dot(value, factor, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)[None, :]
    spot = out + row.to(tl.int64)[:, None] * out_row + output[None, :]
    tl.store(spot, acc.to(out.dtype.element_ty), mask=held[:, None] & real[None, :])


def tile_for(rows: int, dtype: torch.dtype) -> Tile:
    """Measured on an H200 (runtime/bench/LOG.md)."""
    if dtype == torch.float32:
        return _WIDE
    return FEW if rows <= FEW.rows else MANY


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: Tile | None = None) -> None:
    """Write ``x @ weight.T + bias``; `x` ``[T, K]`` and `weight` ``[N, K]`` of one dtype with contiguous rows."""
    rows, (outputs, columns) = x.shape[0], weight.shape
    tile = tile or tile_for(rows, x.dtype)
    # Programs of the same outputs follow each other: they read the same part of the weight.
    _product[(triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.outputs))](
        out,
        x,
        weight,
        weight if bias is None else bias,
        rows,
        outputs,
        columns,
        out.stride(0),
        x.stride(0),
        weight.stride(0),
        M=tile.rows,
        OUTPUTS=tile.outputs,
        DEPTH=_DEPTH,
        EVEN=columns % _DEPTH == 0,
        BIAS=bias is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
