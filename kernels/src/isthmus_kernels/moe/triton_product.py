"""Grouped products over a list of pairs that is cut into tiles of one expert each.

A tile's program multiplies the expert's weight by the tile's rows, in this order: the weight's rows are the larger
side, of a fixed size, and the rows of a tile may be as few as 16 without leaving the tensor cores idle.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from isthmus_kernels.moe.triton_routing import most_tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductPlan:
    """How one product is cut.

    Fields:
        tile: rows of the list a program, a power of two from 16.
        outputs: channels a program; in the gated product of each of gate and up.
        depth: columns a stage.
        halves: tiles that are at most half full take half the work.
        listed: the copy engine reads x, which is in the list's order.
    """

    tile: int
    outputs: int
    depth: int
    warps: int
    stages: int
    halves: bool = False
    listed: bool = False


@triton.jit
def activated(gate, up, alpha, most, CLAMPED: tl.constexpr):
    """The activation between the products; see the README."""
    if CLAMPED:
        gate = tl.minimum(gate, most)
        up = tl.minimum(tl.maximum(up, -most), most) + 1.0
        return gate / (1.0 + tl.exp(-alpha * gate)) * up
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _tile(out, x, x_scales, weight, scales, bias, alpha, most, order, expert, begin, end, output, outputs, columns,
          out_row, x_row, weight_expert, weight_row, TOP_K: tl.constexpr, TILE: tl.constexpr, OUTPUTS: tl.constexpr,
          DEPTH: tl.constexpr, EVEN: tl.constexpr, DESCRIBED: tl.constexpr, LISTED: tl.constexpr, GATED: tl.constexpr,
          SCALED: tl.constexpr, BIASED: tl.constexpr, CLAMPED: tl.constexpr):  # fmt: skip
    place = begin + tl.arange(0, TILE)
    live = place < end
    # The first product reads tokens and writes in the list's order; the second reads and writes that order.
    source = place
    if GATED and not LISTED:
        source = tl.load(order + place, mask=live, other=0) // TOP_K
    lane = tl.arange(0, DEPTH)
    if not LISTED:
        rows = x + source.to(tl.int64)[:, None] * x_row + lane[None, :]
    channel = output + tl.arange(0, OUTPUTS)
    inside = channel < outputs
    first = expert * outputs * (2 if GATED else 1) + output
    if not DESCRIBED:
        factors = weight + expert.to(tl.int64) * weight_expert + channel.to(tl.int64)[:, None] * weight_row
        factors += lane[None, :]
    acc = tl.zeros([OUTPUTS, TILE], tl.float32)
    up = tl.zeros([OUTPUTS, TILE], tl.float32)
    for base in range(0, columns, DEPTH):
        if LISTED:
            # Rows past the tile's end are other experts', and their results are not written.
            value = x.load([begin, base])
        elif EVEN:
            value = tl.load(rows + base, mask=live[:, None], other=0.0)
        else:
            rest = base + lane < columns
            value = tl.load(rows + base, mask=live[:, None] & rest[None, :], other=0.0)
        if DESCRIBED:
            factor = weight.load([first, base])
        else:
            rest = base + lane < columns
            factor = tl.load(factors + base, mask=inside[:, None] & rest[None, :], other=0.0)
        acc = tl.dot(factor, tl.trans(value), acc)
        if GATED:
            if DESCRIBED:
                factor = weight.load([first + outputs, base])
            else:
                second = outputs.to(tl.int64) * weight_row
                factor = tl.load(factors + second + base, mask=inside[:, None] & rest[None, :], other=0.0)
            up = tl.dot(factor, tl.trans(value), up)
    added = expert.to(tl.int64) * (outputs * (2 if GATED else 1)) + channel
    if SCALED:
        own = tl.load(x_scales + source, mask=live, other=0.0)[None, :]
        acc *= tl.load(scales + added, mask=inside, other=0.0)[:, None] * own
        if GATED:
            up *= tl.load(scales + added + outputs, mask=inside, other=0.0)[:, None] * own
    if BIASED:
        acc += tl.load(bias + added, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + added + outputs, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = activated(acc, up, alpha, most, CLAMPED)
    spots = out + place.to(tl.int64)[:, None] * out_row + channel[None, :]
    tl.store(spots, tl.trans(acc).to(out.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit
def _product(
    out,  # [pairs, outputs], in the list's order
    x,  # [T, columns] where GATED, else [pairs, columns] in the list's order; if LISTED a descriptor over the latter
    x_half,  # the same with half the rows, for tiles at most half full
    x_scales,  # [T] or [pairs]; not read unless SCALED
    weight,  # [experts, outputs (twice where GATED), columns]; a descriptor over [experts * ..., columns] if DESCRIBED
    scales,  # [experts, outputs (twice where GATED)]; not read unless SCALED
    bias,  # [experts, outputs (twice where GATED)]; not read unless BIASED
    alpha,
    most,
    order,
    tiles,
    outputs,
    columns,
    out_row,
    x_row,
    weight_expert,
    weight_row,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    HALVES: tl.constexpr,
    EVEN: tl.constexpr,
    DESCRIBED: tl.constexpr,
    LISTED: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    CLAMPED: tl.constexpr,
):
    tile = tl.program_id(1)
    if tile >= tl.load(tiles):
        return
    entry = tiles + (1 + tile) * 4
    expert, begin, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    output = tl.program_id(0) * OUTPUTS
    if HALVES:  # noqa: SIM102 - settled when the kernel is compiled
        if end - begin <= TILE // 2:
            _tile(out, x_half, x_scales, weight, scales, bias, alpha, most, order, expert, begin, end, output, outputs,
                  columns, out_row, x_row, weight_expert, weight_row, TOP_K, TILE // 2, OUTPUTS, DEPTH, EVEN, DESCRIBED,
                  LISTED, GATED, SCALED, BIASED, CLAMPED)  # fmt: skip
            return
    _tile(out, x, x_scales, weight, scales, bias, alpha, most, order, expert, begin, end, output, outputs, columns,
          out_row, x_row, weight_expert, weight_row, TOP_K, TILE, OUTPUTS, DEPTH, EVEN, DESCRIBED, LISTED, GATED,
          SCALED, BIASED, CLAMPED)  # fmt: skip


def describable(matrix: Tensor) -> bool:
    """Say whether the copy engine can read a matrix, or a stack of matrices that follow each other."""
    row = matrix.stride(-2)
    follow = matrix.dim() == 2 or matrix.stride(0) == matrix.shape[1] * row
    return follow and row * matrix.itemsize % 16 == 0 and matrix.data_ptr() % 16 == 0


def _describe(matrix: Tensor, block: list[int]) -> TensorDescriptor:
    rows, columns = matrix.numel() // matrix.shape[-1], matrix.shape[-1]
    return TensorDescriptor(matrix, [rows, columns], [matrix.stride(-2), 1], block)


def grouped_product(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    order: Tensor,
    tiles: Tensor,
    plan: ProductPlan,
    *,
    top_k: int,
    gated: bool,
    clamp: tuple[float, float] | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write the products of `weight` ``[E, N, K]`` with the rows of each tile's expert to `out`, in the list's order.

    Where `gated`, `x` is ``[T, K]``, N is twice out's width and `out` gets the activation of both halves; otherwise
    `x` is in the list's order, as `out` is. `scales`, of 8-bit factors: of x's rows, and of the weight's ``[E, N]``.
    """
    pairs, outputs = out.shape
    columns = x.shape[1]
    described = describable(weight)
    listed = plan.listed and described and describable(x)
    tall, half = (x, x)
    if listed:
        tall, half = (_describe(x, [rows, plan.depth]) for rows in (plan.tile, plan.tile // 2))
    x_scales, weight_scales = scales or (x, weight)
    grid = (triton.cdiv(outputs, plan.outputs), most_tiles(pairs, weight.shape[0], plan.tile))
    _product[grid](
        out,
        tall,
        half,
        x_scales,
        _describe(weight, [plan.outputs, plan.depth]) if described else weight,
        weight_scales,
        weight if bias is None else bias,
        *(clamp or (1.0, 0.0)),
        order,
        tiles,
        outputs,
        columns,
        out.stride(0),
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        TOP_K=top_k,
        TILE=plan.tile,
        OUTPUTS=plan.outputs,
        DEPTH=plan.depth,
        HALVES=plan.halves,
        EVEN=columns % plan.depth == 0,
        DESCRIBED=described,
        LISTED=listed,
        GATED=gated,
        SCALED=scales is not None,
        BIASED=bias is not None,
        CLAMPED=clamp is not None,
        num_warps=plan.warps,
        num_stages=plan.stages,
    )


@triton.jit
def _combine(out, y, weights, places, width, out_row, TOP_K: tl.constexpr, PIECE: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = column < width
    total = tl.zeros([PIECE], tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        row = tl.load(places + pair).to(tl.int64)
        weight = tl.load(weights + pair)
        total += weight * tl.load(y + row * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * out_row + column, total.to(out.dtype.element_ty), mask=inside)


def combine(out: Tensor, y: Tensor, weights: Tensor, places: Tensor, piece: int) -> None:
    """Write each token's weighted sum of its rows of `y` ``[T k, H]``, which `places` names in the order of slots."""
    tokens, top_k = weights.shape
    _combine[(tokens, triton.cdiv(y.shape[1], piece))](
        out, y, weights, places, y.shape[1], out.stride(0), TOP_K=top_k, PIECE=piece, num_warps=4
    )
