"""Linear on a GPU: cuBLAS, and own kernels for the few rows of decoding, which are bound by the weight's bytes."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from isthmus_kernels import batch_invariance, early_launch
from isthmus_kernels.device import multiprocessors, power_of_two, scratch, shared_memory
from isthmus_kernels.linear import torch_impl, triton_invariant
from isthmus_kernels.linear.torch_impl import PlainWeight
from isthmus_kernels.rms_norm.triton_impl import add_parts_rms_norm, rms_norm

MOST_ROWS = 16
# Rows, and outputs, that a multiprocessor takes at once in cuBLAS's products.
_TILE = 128
# Outputs per multiprocessor above which few rows are cuBLAS's: a head's, which are no faster in an engine.
_TALL = 512
# Outputs and columns that a program takes at once for few rows.
_FEW = (64, 128)
_LEAST_PIECE = 1024
_DTYPES = frozenset({torch.bfloat16, torch.float16})


@triton.jit
def _one_row(
    out,
    x,
    weight,
    bias,
    outputs,
    columns,
    weight_row,
    OUTPUTS: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    real = output < outputs
    source = weight + output.to(tl.int64)[:, None] * weight_row
    acc = tl.zeros([OUTPUTS, PIECE], tl.float32)
    if EARLY:
        gdc_launch_dependents()
        column = tl.arange(0, PIECE)
        if EVEN:
            first = tl.load(source + column[None, :], mask=real[:, None], other=0.0)
        else:
            first = tl.load(source + column[None, :], mask=real[:, None] & (column < columns)[None, :], other=0.0)
        gdc_wait()
    # Unrolled: a loop costs up to 7%, even where it has one turn (runtime/bench/LOG.md).
    for piece in tl.static_range(PIECES):
        column = piece * PIECE + tl.arange(0, PIECE)
        if EVEN:
            value = tl.load(x + column)
        else:
            value = tl.load(x + column, mask=column < columns, other=0.0)
        if EARLY and piece == 0:
            factor = first
        elif EVEN:
            factor = tl.load(source + column[None, :], mask=real[:, None], other=0.0)
        else:
            factor = tl.load(source + column[None, :], mask=real[:, None] & (column < columns)[None, :], other=0.0)
        acc += factor.to(tl.float32) * value.to(tl.float32)[None, :]
    result = tl.sum(acc, axis=1)
    if BIAS:
        result += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)
    tl.store(out + output, result.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    out,
    x,
    weight,
    bias,
    partial,  # [parts, outputs, M] fp32
    arrived,  # [programs along outputs] int32, zero between calls
    rows,
    outputs,
    columns,
    span,
    out_row,
    x_row,
    weight_row,
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
    source = weight + output.to(tl.int64)[:, None] * weight_row
    target = x + row[None, :] * x_row
    acc = tl.zeros([OUTPUTS, M], tl.float32)
    begin = part * span
    for base in range(begin, tl.minimum(begin + span, columns), PIECE):
        column = base + tl.arange(0, PIECE)
        if EVEN:
            factor = tl.load(source + column[None, :])
            value = tl.load(target + column[:, None], mask=(row < rows)[None, :], other=0.0)
        else:
            factor = tl.load(source + column[None, :], mask=real[:, None] & (column < columns)[None, :], other=0.0)
            value = tl.load(
                target + column[:, None], mask=(row < rows)[None, :] & (column < columns)[:, None], other=0.0
            )
        acc = tl.dot(factor, value, acc)
    store = real[:, None] & (row < rows)[None, :]
    place = out + row[None, :] * out_row + output[:, None]
    if PARTS == 1:
        if BIAS:
            acc += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)[:, None]
        tl.store(place, acc.to(out.dtype.element_ty), mask=store)
    else:
        spot = output.to(tl.int64)[:, None] * M + row[None, :]
        step = outputs.to(tl.int64) * M
        tl.store(partial + part * step + spot, acc, mask=store)
        tl.debug_barrier()
        if tl.atomic_add(arrived + group, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
            # In the order of the parts, whichever came last: the result does not depend on timing.
            whole = tl.zeros([OUTPUTS, M], tl.float32)
            for index in tl.static_range(PARTS):
                whole += tl.load(partial + index * step + spot, mask=store, other=0.0, cache_modifier=".cg")
            if BIAS:
                whole += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)[:, None]
            tl.store(place, whole.to(out.dtype.element_ty), mask=store)
            tl.store(arrived + group, 0)


def one_row_form(columns: int) -> tuple[int, int, int]:
    """Outputs of a program, columns of a piece and warps, for the product of one row. Measured on an H200
    (runtime/bench/LOG.md). Of the columns alone: joined products have the bits of single ones."""
    even = columns & -columns
    if columns <= 4096:
        # As much of the weight as registers hold is asked for at once, in whole pieces or nearly so.
        piece = min(4096, even if even >= _LEAST_PIECE else power_of_two(columns, 16))
        if columns <= 2048 or 8 * columns >= 7 * piece:
            return 1, piece, 8 if piece == 4096 else 4
        return 2, _LEAST_PIECE, 4
    # Pieces of a long row queue up behind each other: less of it, of two outputs.
    if even >= 2048 and columns < 16384:
        return 2, 512, 2
    return 2, _LEAST_PIECE, 2 if columns <= 8192 else 4


def multiply_one(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write ``x @ weight.T + bias`` of one row by scalar products: every thread streams its share of the weight."""
    outputs, columns = weight.shape
    group, piece, warps = one_row_form(columns)
    early = early_launch.allowed(x.device)
    _one_row[(triton.cdiv(outputs, group),)](
        out,
        x,
        weight,
        weight if bias is None else bias,
        outputs,
        columns,
        weight.stride(0),
        OUTPUTS=group,
        PIECE=piece,
        PIECES=triton.cdiv(columns, piece),
        EVEN=columns % piece == 0,
        BIAS=bias is not None,
        EARLY=early,
        num_warps=warps,
        launch_pdl=early,
    )


def few_rows_form(outputs: int, columns: int, processors: int, room: int) -> tuple[int, int]:
    """Parts of the columns, and stages of a program's loads, for the product of few rows. Measured on an H200
    (runtime/bench/LOG.md). `room`: bytes of shared memory that a program may have."""
    per_program, piece = _FEW
    most = room // ((per_program + MOST_ROWS) * piece * 2)
    groups = triton.cdiv(outputs, per_program)
    parts = 2 if 2 * groups <= processors and columns > 16 * piece else 1
    # Of five stages a multiprocessor has room for two programs, of three for three: where then all run at once.
    return parts, min(most, 3 if 2 * processors < groups <= 3 * processors else 5)


def multiply_few(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write ``x @ weight.T + bias`` of up to 16 rows by tensor cores; two programs share columns of a short weight."""
    outputs, columns = weight.shape
    per_program, piece = _FEW
    groups = triton.cdiv(outputs, per_program)
    parts, stages = few_rows_form(outputs, columns, multiprocessors(x.device), shared_memory(x.device))
    span = triton.cdiv(triton.cdiv(columns, parts), piece) * piece
    parts = triton.cdiv(columns, span)
    room = (parts, outputs, MOST_ROWS) if parts > 1 else (1,)
    partial = scratch("linear partial", x.device, room, torch.float32)
    arrived = scratch("linear arrived", x.device, (groups,), torch.int32)
    _few_rows[(groups, parts)](
        out,
        x,
        weight,
        weight if bias is None else bias,
        partial,
        arrived,
        x.shape[0],
        outputs,
        columns,
        span,
        out.stride(0),
        x.stride(0),
        weight.stride(0),
        M=MOST_ROWS,
        OUTPUTS=per_program,
        PIECE=piece,
        PARTS=parts,
        EVEN=columns % piece == 0 and outputs % per_program == 0,
        BIAS=bias is not None,
        num_warps=4,
        num_stages=stages,
    )


def column_parts(rows: int, outputs: int, columns: int, processors: int) -> int:
    """In how many parts cuBLAS is to sum the columns: two where its tiles of 128 by 128 leave half of the device idle.

    Measured on an H200 (runtime/bench/LOG.md): three and more lose on their sums' way through memory.
    """
    tiles = -(-rows // _TILE) * -(-outputs // _TILE)
    return 2 if 2 * tiles <= processors and columns % 2 == 0 else 1


@dataclass(frozen=True, slots=True)
class SkinnyWeight:
    """A row-major weight that goes to the kernels above for few rows, and to cuBLAS for more."""

    plain: PlainWeight

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.plain.nbytes

    def apply(self, x: Tensor, out: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias``."""
        weight, bias = self.plain.weight, self.plain.bias
        rows = x.shape[0]
        alike = batch_invariance.required(x.device)
        tall = weight.shape[0] > _TALL * multiprocessors(x.device)
        few = 0 < rows <= MOST_ROWS and (rows == 1 or not tall) and x.dtype in _DTYPES and x.stride(1) == 1
        if not few and not (alike and rows > 0):
            return self.plain.apply(x, out)
        if x.stride(1) != 1:
            x = x.contiguous()
        if out is None:
            out = torch.empty((rows, weight.shape[0]), dtype=x.dtype, device=x.device)
        elif out.shape != (rows, weight.shape[0]) or out.dtype != x.dtype or out.stride(1) != 1:
            raise ValueError(f"out: expected {x.dtype} {(rows, weight.shape[0])}, got {out.dtype} {tuple(out.shape)}")
        if alike:
            triton_invariant.multiply(x, weight, bias, out)
        elif rows == 1:
            multiply_one(x, weight, bias, out)
        else:
            multiply_few(x, weight, bias, out)
        return out

    def apply_add_rms_norm(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float, out: Tensor) -> bool:
        """``residual += x @ weight.T``, its RMSNorm to `out`; False where two ops do it faster, or must.

        Sums are rounded once, as part of the residual, which is closer to the definition than product and addition.
        """
        weight, rows = self.plain.weight, x.shape[0]
        if self.plain.bias is not None or x.dtype not in _DTYPES or batch_invariance.required(x.device):
            return False
        if rows <= MOST_ROWS:
            return False
        sums = self.apply_parts(x)
        if sums is None:
            residual.addmm_(x, weight.T)
            rms_norm(residual, norm, eps, out=out)
        else:
            add_parts_rms_norm(sums, residual, norm, eps, out)
        return True

    def apply_parts(self, x: Tensor) -> Tensor | None:
        """fp32 ``[P, T, out]``, whose sum over P is ``x @ weight.T``; None: one product is faster, or has to be."""
        weight, rows = self.plain.weight, x.shape[0]
        if self.plain.bias is not None or x.dtype not in _DTYPES or batch_invariance.required(x.device):
            return None
        outputs, columns = weight.shape
        processors = multiprocessors(x.device)
        parts = 1 if rows <= MOST_ROWS else column_parts(rows, outputs, columns, processors)
        if parts == 1:
            return None
        room = scratch("linear sums", x.device, (processors * _TILE * _TILE,), torch.float32)
        sums = room[: parts * rows * outputs].view(parts, rows, outputs)
        left, right = (matrix.unflatten(1, (parts, -1)) for matrix in (x, weight))
        torch.bmm(left.transpose(0, 1), right.permute(1, 2, 0), out_dtype=torch.float32, out=sums)
        return sums

    def outputs_from(self, first: int) -> "SkinnyWeight":
        """The outputs from `first` on, in the same memory."""
        return SkinnyWeight(self.plain.outputs_from(first))


def pack(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> SkinnyWeight:
    """Convert to the dtype of the activations, once."""
    return SkinnyWeight(torch_impl.pack(weight.contiguous(), bias, dtype))
