"""Low-rank adapters on a GPU: the rows of a tile that have one adapter are multiplied together.

Which adapters are in a tile is read on the device, so that the grids depend on shapes alone. Rows of one request lie
side by side: a tile of a prompt has one adapter, and reads it once; one of a decode step reads each that is in it once.
The first product is cut along the input as well, or a step of few rows would leave the device idle; its sums are added
in a fixed order by the second.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus_kernels import batch_invariance

_ROWS = 16
_INPUTS = 128
_OUTPUTS = 128
_MOST_CUTS = 8
# Bytes of a column of the widest matrix A whose tiles of `_INPUTS` columns fit into shared memory.
_WIDE = 512


@triton.jit
def _shrink(inner, x, slots, a, rows, inputs, x_row, cut, SLOTS: tl.constexpr, RANK: tl.constexpr,
            PADDED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part, number = tl.program_id(1), tl.program_id(2)
    live = row < rows
    own = tl.load(slots + row, mask=live, other=0)
    rank = tl.arange(0, PADDED)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    begin = number * cut
    end = tl.minimum(begin + cut, inputs)
    for slot in range(1, SLOTS + 1):
        mine = own == slot
        if tl.max(mine.to(tl.int32), 0) > 0:
            first = a + ((slot - 1) * WIDTH + part * RANK).to(tl.int64) * inputs
            for base in range(begin, end, INPUTS):
                at = base + tl.arange(0, INPUTS)
                values = tl.load(x + row.to(tl.int64)[:, None] * x_row + at[None, :],
                                 mask=mine[:, None] & (at < end)[None, :], other=0.0)  # fmt: skip
                weights = tl.load(first + rank[:, None] * inputs + at[None, :],
                                  mask=(rank < RANK)[:, None] & (at < end)[None, :], other=0.0)  # fmt: skip
                acc = tl.dot(values, tl.trans(weights), acc, input_precision="ieee")
    spots = inner + (number * rows + row).to(tl.int64)[:, None] * WIDTH + part * RANK + rank[None, :]
    tl.store(spots, acc, mask=(own > 0)[:, None] & (rank < RANK)[None, :])


@triton.jit
def _expand(out, inner, slots, b, rows, outputs, out_row, second, third, CUTS: tl.constexpr, SLOTS: tl.constexpr,
            RANK: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
            OUTPUTS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    start = tl.where(part == 0, 0, tl.where(part == 1, second, third))
    stop = outputs
    if PARTS > 1:
        stop = tl.where(part == 0, second, outputs)
    if PARTS > 2:
        stop = tl.where(part == 0, second, tl.where(part == 1, third, outputs))
    output = start + tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = output < stop
    own = tl.load(slots + row, mask=row < rows, other=0)
    if (tl.max(own, 0) > 0) & (start + tl.program_id(1) * OUTPUTS < stop):
        rank = tl.arange(0, PADDED)
        shrunk = tl.zeros([ROWS, PADDED], tl.float32)
        for number in range(CUTS):
            spots = inner + (number * rows + row).to(tl.int64)[:, None] * WIDTH + part * RANK + rank[None, :]
            shrunk += tl.load(spots, mask=(own > 0)[:, None] & (rank < RANK)[None, :], other=0.0)
        acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for slot in range(1, SLOTS + 1):
            mine = own == slot
            if tl.max(mine.to(tl.int32), 0) > 0:
                first = b + ((slot - 1) * RANK + rank).to(tl.int64)[:, None] * outputs + output[None, :]
                weights = tl.load(first, mask=(rank < RANK)[:, None] & inside[None, :], other=0.0).to(tl.float32)
                acc = tl.dot(tl.where(mine[:, None], shrunk, 0.0), weights, acc, input_precision="ieee")
        places = out + row.to(tl.int64)[:, None] * out_row + output[None, :]
        written = (own > 0)[:, None] & inside[None, :]
        found = tl.load(places, mask=written, other=0.0).to(tl.float32)
        tl.store(places, (found + acc).to(out.dtype.element_ty), mask=written)


def lora(x: Tensor, out: Tensor, slots: Tensor, a: Tensor, b: Tensor, starts: tuple[int, ...]) -> None:
    """Same contract as `reference.lora`."""
    count, parts, rank, inputs = a.shape
    rows, outputs = out.shape
    tiles = triton.cdiv(rows, _ROWS)
    # Their sums are added up: their number is part of the order.
    wanted = _MOST_CUTS if batch_invariance.required(x.device) else 64 // (tiles * parts)
    cuts = max(1, min(_MOST_CUTS, inputs // 256, wanted))
    cut = triton.cdiv(triton.cdiv(inputs, cuts), _INPUTS) * _INPUTS
    inner = torch.empty((cuts, rows, parts * rank), dtype=torch.float32, device=x.device)
    padded = max(16, rank)
    _shrink[(tiles, parts, cuts)](
        inner, x, slots, a, rows, inputs, x.stride(0), cut, SLOTS=count, RANK=rank, PADDED=padded, WIDTH=parts * rank,
        ROWS=_ROWS, INPUTS=_INPUTS if padded * a.element_size() <= _WIDE else _INPUTS // 2,
    )  # fmt: skip
    widest = max(stop - start for start, stop in zip(starts, (*starts[1:], outputs), strict=True))
    second, third = (*starts[1:], outputs, outputs)[:2]
    _expand[(tiles, triton.cdiv(widest, _OUTPUTS), parts)](
        out, inner, slots, b, rows, outputs, out.stride(0), second, third, CUTS=cuts, SLOTS=count, RANK=rank,
        PADDED=padded, WIDTH=parts * rank, PARTS=parts, ROWS=_ROWS, OUTPUTS=_OUTPUTS,
    )  # fmt: skip
