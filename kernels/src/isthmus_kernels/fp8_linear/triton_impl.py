"""Products with 8-bit weights on a GPU: own kernels for the few rows of decoding, torch's scaled product for more."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus_kernels.device import multiprocessors, power_of_two, scratch, shared_memory
from isthmus_kernels.fp8_linear import reference
from isthmus_kernels.fp8_linear.reference import LARGEST, ScaledWeight

MOST_ROWS = 16
# Outputs per multiprocessor up to which a program takes two for one row, and four for longer weights.
_SHORT = 32
# Columns of one row up to which scalar products are as fast as the tensor cores with the rounding that these need.
_SCALAR_COLUMNS = 16384
# Outputs that a program takes for few rows.
_FEW = 64
_E4M3 = torch.float8_e4m3fn
# Torch's scaled product takes sides that are multiples of this.
_SIDE = 16
_LEAST_WITH_BIAS = 32


@triton.jit
def _quantize(out, scales, x, width, x_row, WIDTH_PAD: tl.constexpr, LARGEST: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_PAD)
    inside = column < width
    value = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(value), axis=0), 1e-12)
    # Rounded as the definition's reciprocal is: one number a row costs nothing.
    factor = tl.div_rn(1.0 + tl.zeros_like(most), most) * LARGEST
    tl.store(out + row * width + column, (value * factor).to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, most * (1.0 / LARGEST))


@triton.jit
def _one_row(
    out,
    x,
    weight,
    scales,
    bias,
    outputs,
    columns,
    OUTPUTS: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    real = output < outputs
    source = weight + output.to(tl.int64)[:, None] * columns
    acc = tl.zeros([OUTPUTS, PIECE], tl.float32)
    # Unrolled, as the product of one row with 16-bit weights.
    for piece in tl.static_range(PIECES):
        column = piece * PIECE + tl.arange(0, PIECE)
        if EVEN:
            value = tl.load(x + column)
            factor = tl.load(source + column[None, :], mask=real[:, None], other=0.0)
        else:
            value = tl.load(x + column, mask=column < columns, other=0.0)
            factor = tl.load(source + column[None, :], mask=real[:, None] & (column < columns)[None, :], other=0.0)
        acc += factor.to(tl.float32) * value.to(tl.float32)[None, :]
    result = tl.sum(acc, axis=1) * tl.load(scales + output, mask=real, other=0.0)
    if BIAS:
        result += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)
    tl.store(out + output, result.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    out,
    x,
    x_scales,
    weight,
    scales,
    bias,
    partial,  # [parts, outputs, M] fp32
    arrived,  # [programs along outputs] int32, zero between calls
    rows,
    outputs,
    columns,
    span,
    out_row,
    M: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PIECE: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
):
    group = tl.program_id(0)
    part = tl.program_id(1)
    output = group * OUTPUTS + tl.arange(0, OUTPUTS)
    real = output < outputs
    row = tl.arange(0, M)
    lane = tl.arange(0, PIECE)
    source = weight + output.to(tl.int64)[:, None] * columns + lane[None, :]
    target = x + row[:, None] * columns + lane[None, :]
    acc = tl.zeros([OUTPUTS, M], tl.float32)
    begin = part * span
    for base in range(begin, tl.minimum(begin + span, columns), PIECE):
        if EVEN:
            factor = tl.load(source + base)
            value = tl.load(target + base, mask=(row < rows)[:, None], other=0.0)
        else:
            rest = (base + lane < columns)[None, :]
            factor = tl.load(source + base, mask=real[:, None] & rest, other=0.0)
            value = tl.load(target + base, mask=(row < rows)[:, None] & rest, other=0.0)
        acc = tl.dot(factor, tl.trans(value), acc)
    store = real[:, None] & (row < rows)[None, :]
    place = out + row[None, :] * out_row + output[:, None]
    last = True
    if PARTS > 1:
        spot = output.to(tl.int64)[:, None] * M + row[None, :]
        step = outputs.to(tl.int64) * M
        tl.store(partial + part * step + spot, acc, mask=store)
        tl.debug_barrier()
        last = tl.atomic_add(arrived + group, 1, sem="acq_rel", scope="gpu") == PARTS - 1
        if last:
            # In the order of the parts, whichever came last: the result does not depend on timing.
            acc = tl.zeros([OUTPUTS, M], tl.float32)
            for index in tl.static_range(PARTS):
                acc += tl.load(partial + index * step + spot, mask=store, other=0.0, cache_modifier=".cg")
            tl.store(arrived + group, 0)
    if last:
        acc *= tl.load(scales + output, mask=real, other=0.0)[:, None]
        acc *= tl.load(x_scales + row, mask=row < rows, other=0.0)[None, :]
        if BIAS:
            acc += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)[:, None]
        tl.store(place, acc.to(out.dtype.element_ty), mask=store)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Same contract as `reference.quantize`."""
    rows, width = x.shape
    rounded = torch.empty((rows, width), dtype=_E4M3, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows > 0:
        pad = power_of_two(width)
        _quantize[(rows,)](
            rounded,
            scales,
            x,
            width,
            x.stride(0),
            WIDTH_PAD=pad,
            LARGEST=LARGEST,
            num_warps=min(16, max(1, pad // 512)),
        )
    return rounded, scales


def few_rows_form(outputs: int, columns: int, processors: int, room: int) -> tuple[int, int, int]:
    """Columns of a piece, parts of the columns and stages of a program's loads, for the product of few rows: as many
    stages as leave room for all programs at once. Measured on an H200 (runtime/bench/LOG.md). `room`: bytes of shared
    memory that a program may have."""
    groups = triton.cdiv(outputs, _FEW)
    parts = 2 if 3 * groups <= processors and columns > 512 else 1
    for rounds, stages in ((1, 6), (2, 4), (3, 3)):
        if groups * parts <= rounds * processors:
            return 256, parts, min(stages, room // ((_FEW + MOST_ROWS) * 256))
    return 128, 1, min(6, room // ((_FEW + MOST_ROWS) * 128))


def multiply_one(x: Tensor, held: ScaledWeight, out: Tensor) -> None:
    """Write the product of one row, which stays unrounded: every thread streams its share of the weight."""
    outputs, columns = held.weight.shape
    group = 2 if outputs <= _SHORT * multiprocessors(x.device) else 4
    piece = min(512, power_of_two(columns, 16))
    _one_row[(triton.cdiv(outputs, group),)](
        out,
        x,
        held.weight,
        held.scale,
        held.scale if held.bias is None else held.bias,
        outputs,
        columns,
        OUTPUTS=group,
        PIECE=piece,
        PIECES=triton.cdiv(columns, piece),
        EVEN=columns % piece == 0,
        BIAS=held.bias is not None,
        num_warps=2,
    )


def multiply_few(x: Tensor, held: ScaledWeight, out: Tensor) -> None:
    """Write the product of up to 16 rows by tensor cores, the columns shared among several programs."""
    outputs, columns = held.weight.shape
    groups = triton.cdiv(outputs, _FEW)
    piece, parts, stages = few_rows_form(outputs, columns, multiprocessors(x.device), shared_memory(x.device))
    span = triton.cdiv(triton.cdiv(columns, parts), piece) * piece
    parts = triton.cdiv(columns, span)
    rounded, x_scales = quantize(x)
    _few_rows[(groups, parts)](
        out,
        rounded,
        x_scales,
        held.weight,
        held.scale,
        held.scale if held.bias is None else held.bias,
        scratch("fp8 partial", x.device, (parts, outputs, MOST_ROWS) if parts > 1 else (1,), torch.float32),
        scratch("fp8 arrived", x.device, (groups,), torch.int32),
        x.shape[0],
        outputs,
        columns,
        span,
        out.stride(0),
        M=MOST_ROWS,
        OUTPUTS=_FEW,
        PIECE=piece,
        PARTS=parts,
        EVEN=columns % piece == 0 and outputs % _FEW == 0,
        BIAS=held.bias is not None,
        num_warps=4,
        num_stages=stages,
    )


def multiply_many(x: Tensor, held: ScaledWeight, out: Tensor) -> None:
    """Write the product of any number of rows by torch's scaled product."""
    rounded, x_scales = quantize(x)
    # cuBLASLt of CUDA 13.0 has no algorithm that adds a bias to 17 to 31 rows of 12,288 columns: it is added after.
    within = held.bias if x.shape[0] >= _LEAST_WITH_BIAS else None
    torch._scaled_mm(
        rounded,
        held.weight.t(),
        scale_a=x_scales[:, None],
        scale_b=held.scale[None, :],
        bias=within,
        out_dtype=out.dtype,
        use_fast_accum=True,
        out=out,
    )
    if within is None and held.bias is not None:
        out.add_(held.bias)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """An 8-bit weight that goes to the kernels above by the number of rows."""

    held: ScaledWeight

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.held.nbytes

    def apply(self, x: Tensor, out: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias``."""
        rows, shape = x.shape[0], (x.shape[0], self.held.weight.shape[0])
        if out is None:
            out = torch.empty(shape, dtype=x.dtype, device=x.device)
        elif out.shape != shape or out.dtype != x.dtype or out.stride(1) != 1:
            raise ValueError(f"out: expected {x.dtype} {shape}, got {out.dtype} {tuple(out.shape)}")
        if x.stride(1) != 1:
            raise ValueError(f"x: expected contiguous rows, got strides {x.stride()}")
        if rows == 1 and self.held.weight.shape[1] <= _SCALAR_COLUMNS:
            multiply_one(x, self.held, out)
        elif 0 < rows <= MOST_ROWS:
            multiply_few(x, self.held, out)
        elif rows > 0:
            multiply_many(x, self.held, out)
        return out

    def outputs_from(self, first: int) -> "Fp8Weight | None":
        """The outputs from `first` on, in the same memory; None where torch's product would not begin at 16 outputs."""
        return None if first % _SIDE else Fp8Weight(self.held.outputs_from(first))


def pack_fp8(weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Fp8Weight:
    """Hold them, for activations of bf16 or fp16."""
    outputs, columns = weight.shape
    if outputs % _SIDE or columns % _SIDE:
        raise ValueError(f"weight: {outputs} x {columns} has a side that is not a multiple of {_SIDE}")
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"dtype: expected bfloat16 or float16 activations, got {dtype}")
    return Fp8Weight(reference.pack_fp8(weight, scale, bias, dtype))
