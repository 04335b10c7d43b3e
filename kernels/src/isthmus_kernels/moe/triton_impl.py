"""Mixture of experts on a GPU, without the host: route, arrange the pairs by expert, two grouped products, combine.

A pair is one token with one of its experts. `_arrange` lists the pairs expert by expert; a product's program finds its
expert in the list's starts, so that grids depend on bounds only. Many rows an expert go through torch's grouped
product, few through our own, which fuses the gate.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus_kernels.device import power_of_two
from isthmus_kernels.moe.reference import gated
from isthmus_kernels.silu_mul.triton_impl import silu_mul

# Mean pairs an expert from which torch's grouped product is taken.
_MANY = 64


@triton.jit
def _route(weights, experts, logits, row_stride, COUNT: tl.constexpr, PAD: tl.constexpr, TOP_K: tl.constexpr,
           TOP_K_PAD: tl.constexpr, RENORMALIZE: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    index = tl.arange(0, PAD)
    left = tl.load(logits + row.to(tl.int64) * row_stride + index, mask=index < COUNT, other=float("-inf"))
    left = left.to(tl.float32)
    peak = tl.max(left, axis=0)
    total = tl.sum(tl.exp(left - peak), axis=0)
    place = tl.arange(0, TOP_K_PAD)
    value = tl.zeros([TOP_K_PAD], tl.float32)
    chosen = tl.zeros([TOP_K_PAD], tl.int32)
    for rank in tl.static_range(TOP_K):
        best = tl.max(left, axis=0)
        expert = tl.min(tl.where(left == best, index, PAD), axis=0)
        value = tl.where(place == rank, tl.exp(best - peak) / total, value)
        chosen = tl.where(place == rank, expert, chosen)
        left = tl.where(index == expert, float("-inf"), left)
    if RENORMALIZE:
        value = value / tl.sum(value, axis=0)
    tl.store(weights + row * TOP_K + place, value, mask=place < TOP_K)
    tl.store(experts + row * TOP_K + place, chosen, mask=place < TOP_K)


@triton.jit(do_not_specialize=["pairs"])
def _arrange(order, starts, experts, pairs, PIECE: tl.constexpr):
    """One program an expert (and one past the last): where its pairs begin, and which they are."""
    expert = tl.program_id(0)
    lane = tl.arange(0, PIECE)
    before = tl.zeros([PIECE], tl.int32)
    for base in range(0, pairs, PIECE):
        chosen = tl.load(experts + base + lane, mask=base + lane < pairs, other=0x7FFFFFFF)
        before += (chosen < expert).to(tl.int32)
    place = tl.sum(before, axis=0)
    tl.store(starts + expert, place)
    for base in range(0, pairs, PIECE):
        chosen = tl.load(experts + base + lane, mask=base + lane < pairs, other=0x7FFFFFFF)
        own = (chosen == expert).to(tl.int32)
        rank = tl.cumsum(own, axis=0)
        tl.store(order + place + rank - 1, base + lane, mask=own > 0)
        place += tl.max(rank, axis=0)


@triton.jit
def _product(
    out,  # [pairs, outputs]
    x,  # [T, columns] where GATED, else [pairs, columns] in the list's order
    weight,  # [experts, outputs (twice where GATED), columns]
    bias,  # [experts, outputs (twice where GATED)]; not read unless BIASED
    alpha,
    most,
    order,
    starts,
    outputs,
    columns,
    out_row,
    x_row,
    weight_expert,
    weight_row,
    EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    CLAMPED: tl.constexpr,
):
    index = tl.arange(0, EXPERTS_PAD)
    real = index < EXPERTS
    begins = tl.load(starts + index, mask=real, other=0)
    counts = tl.load(starts + index + 1, mask=real, other=0) - begins
    blocks = (counts + M - 1) // M
    ends = tl.cumsum(blocks, axis=0)
    block = tl.program_id(1)
    if block >= tl.max(ends, axis=0):
        return
    expert = tl.sum((ends <= block).to(tl.int32), axis=0)
    first_block = tl.max(tl.where(ends <= block, ends, 0), axis=0)
    begin = tl.load(starts + expert)
    end = tl.load(starts + expert + 1)
    place = begin + (block - first_block) * M + tl.arange(0, M)
    live = place < end
    pair = tl.load(order + place, mask=live, other=0)
    # The first product reads tokens and writes in the list's order; the second reads that and writes to the pairs.
    source = (pair // TOP_K if GATED else place).to(tl.int64)
    target = (place if GATED else pair).to(tl.int64)
    output = tl.program_id(0) * N + tl.arange(0, N)
    inside = output < outputs
    lane = tl.arange(0, K)
    rows = x + source[:, None] * x_row + lane[None, :]
    factors = weight + expert.to(tl.int64) * weight_expert + output.to(tl.int64)[None, :] * weight_row + lane[:, None]
    acc = tl.zeros([M, N], tl.float32)
    up = tl.zeros([M, N], tl.float32)
    for base in range(0, columns, K):
        rest = base + lane < columns
        value = tl.load(rows + base, mask=live[:, None] & rest[None, :], other=0.0)
        factor = tl.load(factors + base, mask=inside[None, :] & rest[:, None], other=0.0)
        acc = tl.dot(value, factor, acc)
        if GATED:
            second = outputs.to(tl.int64) * weight_row
            factor = tl.load(factors + second + base, mask=inside[None, :] & rest[:, None], other=0.0)
            up = tl.dot(value, factor, up)
    if BIASED:
        added = bias + expert.to(tl.int64) * (outputs * (2 if GATED else 1)) + output
        acc += tl.load(added, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(added + outputs, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED and CLAMPED:
        acc = tl.minimum(acc, most)
        up = tl.minimum(tl.maximum(up, -most), most) + 1.0
        acc = acc / (1.0 + tl.exp(-alpha * acc)) * up
    elif GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    spots = out + target[:, None] * out_row + output[None, :]
    tl.store(spots, acc.to(out.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit
def _combine(out, y, weights, places, width, out_row, TOP_K: tl.constexpr, PIECE: tl.constexpr, PLACED: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = column < width
    total = tl.zeros([PIECE], tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        row = pair.to(tl.int64)
        if PLACED:
            row = tl.load(places + pair).to(tl.int64)
        weight = tl.load(weights + pair)
        total += weight * tl.load(y + row * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * out_row + column, total.to(out.dtype.element_ty), mask=inside)


def moe_route(logits: Tensor, top_k: int, *, renormalize: bool = True) -> tuple[Tensor, Tensor]:
    """Same contract as `reference.moe_route`."""
    rows, count = logits.shape
    weights = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
    experts = torch.empty((rows, top_k), dtype=torch.int32, device=logits.device)
    if rows > 0:
        _route[(rows,)](
            weights,
            experts,
            logits,
            logits.stride(0),
            COUNT=count,
            PAD=power_of_two(count),
            TOP_K=top_k,
            TOP_K_PAD=power_of_two(top_k),
            RENORMALIZE=renormalize,
            num_warps=1,
        )
    return weights, experts


def moe(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    clamp: tuple[float, float] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Same contract as `reference.moe`."""
    tokens, top_k = experts.shape
    count, hidden, inner = down.shape
    if out is None:
        out = torch.empty_like(x)
    if tokens == 0:
        return out
    pairs = tokens * top_k
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    starts = torch.empty(count + 1, dtype=torch.int32, device=x.device)
    _arrange[(count + 1,)](order, starts, experts, pairs, PIECE=1024, num_warps=4)
    places = order
    if x.is_cuda and pairs >= _MANY * count:
        order = order.long()
        both = torch._grouped_mm(x[order // top_k], gate_up.transpose(1, 2), offs=starts[1:])
        chosen = experts.view(-1)[order]
        if gate_up_bias is not None:
            both += gate_up_bias[chosen]
        between = silu_mul(both) if clamp is None else gated(both, clamp).to(x.dtype)
        y = torch._grouped_mm(between, down.transpose(1, 2), offs=starts[1:])
        if down_bias is not None:
            y += down_bias[chosen]
        places = torch.empty(pairs, dtype=torch.int32, device=x.device)
        places[order] = torch.arange(pairs, dtype=torch.int32, device=x.device)
        placed = True
    else:
        placed = False
        # Each expert may leave one block partly filled, and no block is empty.
        rows = 16 if pairs <= 16 * count else 64
        blocks = min(pairs, pairs // rows + count)
        y_inner = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
        y = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
        common = {"EXPERTS": count, "EXPERTS_PAD": power_of_two(count), "TOP_K": top_k, "M": rows, "num_warps": 4}
        first, second = (y_inner, x, gate_up, gate_up_bias, True), (y, y_inner, down, down_bias, False)
        for target, source, weight, bias, gated_step in (first, second):
            outputs = target.shape[1]
            wide = 32 if gated_step else 64
            _product[(triton.cdiv(outputs, wide), blocks)](
                target,
                source,
                weight,
                weight if bias is None else bias,
                *(clamp or (1.0, 0.0)),
                order,
                starts,
                outputs,
                source.shape[1],
                target.stride(0),
                source.stride(0),
                weight.stride(0),
                weight.stride(1),
                N=wide,
                K=128,
                GATED=gated_step,
                BIASED=bias is not None,
                CLAMPED=clamp is not None,
                num_stages=4,
                **common,
            )
    piece = min(1024, power_of_two(hidden))
    _combine[(tokens, triton.cdiv(hidden, piece))](
        out, y, weights, places, hidden, out.stride(0), TOP_K=top_k, PIECE=piece, PLACED=placed, num_warps=4
    )
    return out
