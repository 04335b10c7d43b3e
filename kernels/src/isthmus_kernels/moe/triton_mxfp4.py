"""Experts of 4-bit floats (`mxfp4`) times bf16: unpacked in registers, to the numbers that they stand for.

E2M1's bits, moved to where bf16 has its sign, the end of its exponent and the beginning of its mantissa, are the number
times 2^-126, subnormals included. So one exact multiplication by 2^126 times the group's power is all that is left.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from isthmus_kernels.device import interpreted
from isthmus_kernels.moe.mxfp4 import blocks_of
from isthmus_kernels.moe.triton_product import activated, describable
from isthmus_kernels.moe.triton_routing import most_tiles

_HALF = tl.constexpr(64)
"""Bytes of a block of a row: each has a column of its first half, and one of its second."""
# Of four bytes the lower or the upper halves, as two registers of two numbers each, times two of scales: each byte goes
# to the upper end of 16 bits, then sign and the other three bits to their places. fma with -0 is how compute capability
# 8 multiplies bf16.
_UNPACK = """{{
.reg .b32 a, b, s, t, z;
{shift}
prmt.b32 a, s, 0, 0x1404;
prmt.b32 b, s, 0, 0x3424;
and.b32 t, a, 0x70007000;
shr.b32 t, t, 6;
lop3.b32 a, a, 0x80008000, t, 0xEA;
and.b32 t, b, 0x70007000;
shr.b32 t, t, 6;
lop3.b32 b, b, 0x80008000, t, 0xEA;
mov.b32 z, 0x80008000;
fma.rn.bf16x2 $0, a, $3, z;
fma.rn.bf16x2 $1, b, $4, z;
}}"""
_LOWER = tl.constexpr(_UNPACK.format(shift="shl.b32 s, $2, 4;"))
_UPPER = tl.constexpr(_UNPACK.format(shift="mov.b32 s, $2;"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPlan:
    """How one product is cut: rows of the list and channels a program (in the gated product of each of gate and up)."""

    tile: int
    outputs: int
    warps: int
    stages: int


@triton.jit
def _power(word, GROUP: tl.constexpr):
    """2^126 times the power of a block's group, bf16."""
    bits = (((word >> (8 * GROUP)) & 255) + 126) << 7
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _columns(packed, scale, UPPER: tl.constexpr, INTERPRETED: tl.constexpr):
    """The numbers in the lower or upper halves of bytes, bf16."""
    if INTERPRETED:
        code = packed.to(tl.int32)
        if UPPER:
            code = code >> 4
        bits = ((code & 8) << 28) | ((code & 7) << 22)
        result = (bits.to(tl.float32, bitcast=True) * scale.to(tl.float32)).to(tl.bfloat16)
    elif UPPER:
        result = tl.inline_asm_elementwise(
            _UPPER, "=r,=r,r,r,r", [packed, scale], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        result = tl.inline_asm_elementwise(
            _LOWER, "=r,=r,r,r,r", [packed, scale], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    return result


@triton.jit
def _unpacked(packed, word, INTERPRETED: tl.constexpr):
    """Blocks' first and second 64 columns, bf16 [..., 64] each, of bytes [..., 64] and scales [..., 1]."""
    former = tl.arange(0, _HALF) < 32
    low = tl.where(former, _power(word, 0), _power(word, 1))
    high = tl.where(former, _power(word, 2), _power(word, 3))
    return _columns(packed, low, False, INTERPRETED), _columns(packed, high, True, INTERPRETED)


@triton.jit
def _product(
    out,  # [pairs, outputs], in the list's order
    x,  # [T, columns] where GATED, else [pairs, columns] in the list's order
    weight,  # bytes [experts, outputs (twice where GATED), 64 blocks]; a descriptor over all rows if DESCRIBED
    scales,  # int32 [experts, outputs (twice where GATED), blocks], contiguous
    bias,  # [experts, outputs (twice where GATED)]; not read unless BIASED
    alpha,
    most,
    order,
    tiles,
    outputs,
    columns,
    blocks,
    out_row,
    x_row,
    weight_expert,
    weight_row,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    EVEN: tl.constexpr,
    DESCRIBED: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    CLAMPED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    tile = tl.program_id(1)
    if tile >= tl.load(tiles):
        return
    entry = tiles + (1 + tile) * 4
    expert, begin, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    place = begin + tl.arange(0, TILE)
    live = place < end
    # The first product reads tokens and writes in the list's order; the second reads and writes that order.
    source = place
    if GATED:
        source = tl.load(order + place, mask=live, other=0) // TOP_K
    lane = tl.arange(0, _HALF)
    rows = x + source.to(tl.int64)[:, None] * x_row + lane[None, :]
    output = tl.program_id(0) * OUTPUTS
    channel = output + tl.arange(0, OUTPUTS)
    inside = channel < outputs
    first = expert * outputs * (2 if GATED else 1) + output
    added = expert.to(tl.int64) * (outputs * (2 if GATED else 1)) + channel
    words = scales + added * blocks
    second = outputs.to(tl.int64)
    if not DESCRIBED:
        bytes_of = weight + expert.to(tl.int64) * weight_expert + channel.to(tl.int64)[:, None] * weight_row
        bytes_of += lane[None, :]
    acc = tl.zeros([OUTPUTS, TILE], tl.float32)
    up = tl.zeros([OUTPUTS, TILE], tl.float32)
    for block in range(blocks):
        base = block * 2 * _HALF
        if EVEN:
            former = tl.load(rows + base, mask=live[:, None], other=0.0)
            latter = tl.load(rows + base + _HALF, mask=live[:, None], other=0.0)
        else:
            former = tl.load(rows + base, mask=live[:, None] & (base + lane < columns)[None, :], other=0.0)
            latter = tl.load(rows + base + _HALF, mask=live[:, None] & (base + _HALF + lane < columns)[None, :],
                             other=0.0)  # fmt: skip
        if DESCRIBED:
            packed = weight.load([first, block * _HALF])
        else:
            packed = tl.load(bytes_of + block * _HALF, mask=inside[:, None], other=0)
        word = tl.load(words + block, mask=inside, other=0)
        low, high = _unpacked(packed, word[:, None], INTERPRETED)
        acc = tl.dot(low, tl.trans(former), acc)
        acc = tl.dot(high, tl.trans(latter), acc)
        if GATED:
            if DESCRIBED:
                packed = weight.load([first + outputs, block * _HALF])
            else:
                packed = tl.load(bytes_of + second * weight_row + block * _HALF, mask=inside[:, None], other=0)
            word = tl.load(words + second * blocks + block, mask=inside, other=0)
            low, high = _unpacked(packed, word[:, None], INTERPRETED)
            up = tl.dot(low, tl.trans(former), up)
            up = tl.dot(high, tl.trans(latter), up)
    if BIASED:
        acc += tl.load(bias + added, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + added + outputs, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = activated(acc, up, alpha, most, CLAMPED)
    spots = out + place.to(tl.int64)[:, None] * out_row + channel[None, :]
    tl.store(spots, tl.trans(acc).to(out.dtype.element_ty), mask=live[:, None] & inside[None, :])


def packed_product(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    order: Tensor,
    tiles: Tensor,
    plan: PackedPlan,
    *,
    top_k: int,
    gated: bool,
    clamp: tuple[float, float] | None = None,
) -> None:
    """As `triton_product.grouped_product`, of a weight as `mxfp4` has it."""
    pairs, outputs = out.shape
    columns, blocks = x.shape[1], scales.shape[2]
    described = describable(weight)
    held = weight
    if described:
        size = [weight.shape[0] * weight.shape[1], weight.shape[2]]
        held = TensorDescriptor(weight, size, [weight.stride(1), 1], [plan.outputs, 64])
    grid = (triton.cdiv(outputs, plan.outputs), most_tiles(pairs, weight.shape[0], plan.tile))
    _product[grid](
        out,
        x,
        held,
        scales,
        x if bias is None else bias,
        *(clamp or (1.0, 0.0)),
        order,
        tiles,
        outputs,
        columns,
        blocks,
        out.stride(0),
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        TOP_K=top_k,
        TILE=plan.tile,
        OUTPUTS=plan.outputs,
        EVEN=columns % 128 == 0,
        DESCRIBED=described,
        GATED=gated,
        BIASED=bias is not None,
        CLAMPED=clamp is not None,
        INTERPRETED=interpreted(),
        num_warps=plan.warps,
        num_stages=plan.stages,
    )


@triton.jit
def _expand(out, packed, scales, columns, blocks, ROWS: tl.constexpr, SPAN: tl.constexpr, INTERPRETED: tl.constexpr):
    """One program SPAN blocks of a few rows; of the last block only what the matrix has."""
    # Rows are a multiple of what a program has.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, _HALF)
    first = tl.program_id(1) * SPAN
    for block in range(first, tl.minimum(first + SPAN, blocks)):
        at = row * blocks + block
        held = tl.load(packed + at[:, None] * _HALF + lane[None, :])
        low, high = _unpacked(held, tl.load(scales + at)[:, None], INTERPRETED)
        column = block * 2 * _HALF + lane
        spots = out + row[:, None] * columns + column[None, :]
        tl.store(spots, low, mask=(column < columns)[None, :])
        tl.store(spots + _HALF, high, mask=(column + _HALF < columns)[None, :])


def expanded(packed: Tensor, scales: Tensor, columns: int) -> Tensor:
    """The matrices, bf16 ``[E, N, columns]``, in memory of their own. Both contiguous, N a multiple of 32."""
    count, outputs, blocks = scales.shape
    out = torch.empty((count, outputs, columns), dtype=torch.bfloat16, device=packed.device)
    _expand[(count * outputs // 32, triton.cdiv(blocks, 8))](
        out, packed, scales, columns, blocks, ROWS=32, SPAN=8, INTERPRETED=interpreted(), num_warps=4
    )
    return out


@triton.jit
def _up(out, x, weight, scales, bias, experts, alpha, most, inner, columns, blocks, x_row, weight_expert, weight_row,
        TOP_K: tl.constexpr, CHANNELS: tl.constexpr, SPAN: tl.constexpr, PIECES: tl.constexpr, BIASED: tl.constexpr,
        CLAMPED: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    """One program a pair and few channels: gate and up of its expert, and their product."""
    pair = tl.program_id(1)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < inner
    expert = tl.load(experts + pair).to(tl.int64)
    added = expert * (2 * inner) + channel
    lane = tl.arange(0, _HALF)
    source = x + (pair // TOP_K).to(tl.int64) * x_row
    rows = (weight + expert * weight_expert + channel.to(tl.int64) * weight_row)[:, None, None] + lane[None, None, :]
    words = (scales + added * blocks)[:, None, None]
    step = inner.to(tl.int64)
    gate = tl.zeros([CHANNELS, SPAN, _HALF], tl.float32)
    up = tl.zeros([CHANNELS, SPAN, _HALF], tl.float32)
    for piece in tl.static_range(PIECES):
        block = piece * SPAN + tl.arange(0, SPAN)
        column = (block * 2 * _HALF)[:, None] + lane[None, :]
        former = tl.load(source + column, mask=column < columns, other=0.0).to(tl.float32)[None, :, :]
        latter = tl.load(source + column + _HALF, mask=column + _HALF < columns, other=0.0).to(tl.float32)[None, :, :]
        inside = real[:, None, None] & (block < blocks)[None, :, None]
        at = block[None, :, None]
        packed = tl.load(rows + at * _HALF, mask=inside, other=0)
        word = tl.load(words + at, mask=inside, other=0)
        other = tl.load(rows + step * weight_row + at * _HALF, mask=inside, other=0)
        other_word = tl.load(words + step * blocks + at, mask=inside, other=0)
        low, high = _unpacked(packed, word, INTERPRETED)
        gate += low.to(tl.float32) * former + high.to(tl.float32) * latter
        low, high = _unpacked(other, other_word, INTERPRETED)
        up += low.to(tl.float32) * former + high.to(tl.float32) * latter
    left, right = tl.sum(tl.sum(gate, axis=2), axis=1), tl.sum(tl.sum(up, axis=2), axis=1)
    if BIASED:
        left += tl.load(bias + added, mask=real, other=0.0).to(tl.float32)
        right += tl.load(bias + added + inner, mask=real, other=0.0).to(tl.float32)
    result = activated(left, right, alpha, most, CLAMPED)
    tl.store(out + pair.to(tl.int64) * inner + channel, result.to(out.dtype.element_ty), mask=real)


@triton.jit
def _down(out, between, weight, scales, bias, weights, experts, inner, blocks, hidden, out_row, weight_expert,
          weight_row, TOP_K: tl.constexpr, SLOTS: tl.constexpr, SPAN: tl.constexpr, PIECES: tl.constexpr,
          BIASED: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    """One program a token and channel: the products of all its experts, weighted and added."""
    channel, token = tl.program_id(0), tl.program_id(1)
    slot = tl.arange(0, SLOTS)
    real = slot < TOP_K
    pair = token * TOP_K + slot
    expert = tl.load(experts + pair, mask=real, other=0).to(tl.int64)
    share = tl.load(weights + pair, mask=real, other=0.0)
    added = expert * hidden + channel
    lane = tl.arange(0, _HALF)
    rows = (weight + expert * weight_expert + channel.to(tl.int64) * weight_row)[:, None, None] + lane[None, None, :]
    words = (scales + added * blocks)[:, None, None]
    sources = (between + pair.to(tl.int64) * inner)[:, None, None] + lane[None, None, :]
    acc = tl.zeros([SLOTS, SPAN, _HALF], tl.float32)
    for piece in tl.static_range(PIECES):
        block = piece * SPAN + tl.arange(0, SPAN)
        column = (block * 2 * _HALF)[None, :, None] + lane[None, None, :]
        inside = real[:, None, None] & (block < blocks)[None, :, None]
        at = block[None, :, None]
        packed = tl.load(rows + at * _HALF, mask=inside, other=0)
        word = tl.load(words + at, mask=inside, other=0)
        start = at * 2 * _HALF
        former = tl.load(sources + start, mask=real[:, None, None] & (column < inner), other=0.0)
        latter = tl.load(sources + start + _HALF, mask=real[:, None, None] & (column + _HALF < inner), other=0.0)
        low, high = _unpacked(packed, word, INTERPRETED)
        acc += low.to(tl.float32) * former.to(tl.float32) + high.to(tl.float32) * latter.to(tl.float32)
    result = tl.sum(tl.sum(acc, axis=2), axis=1)
    if BIASED:
        result += tl.load(bias + added, mask=real, other=0.0).to(tl.float32)
    total = tl.sum(result * share, axis=0)
    tl.store(out + token.to(tl.int64) * out_row + channel, total.to(out.dtype.element_ty))


def packed_pairs(
    x: Tensor,
    between: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor,
    down_scale: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    clamp: tuple[float, float] | None,
    out: Tensor,
    *,
    up_form: tuple[int, int, int] = (2, 8, 4),
    down_form: tuple[int, int] = (8, 4),
) -> None:
    """The mixture by two launches that need no list of pairs; `between` ``[pairs, I]`` is scratch.

    `up_form`: channels, blocks of a row that are unpacked at once, warps; `down_form` the latter two.
    """
    tokens, top_k = experts.shape
    hidden, inner = x.shape[1], between.shape[1]
    channels, most, warps = up_form
    count = blocks_of(hidden)
    span = min(most, triton.next_power_of_2(count))
    _up[(triton.cdiv(inner, channels), tokens * top_k)](
        between,
        x,
        gate_up,
        gate_up_scale,
        x if gate_up_bias is None else gate_up_bias,
        experts,
        *(clamp or (1.0, 0.0)),
        inner,
        hidden,
        count,
        x.stride(0),
        gate_up.stride(0),
        gate_up.stride(1),
        TOP_K=top_k,
        CHANNELS=channels,
        SPAN=span,
        PIECES=triton.cdiv(count, span),
        BIASED=gate_up_bias is not None,
        CLAMPED=clamp is not None,
        INTERPRETED=interpreted(),
        num_warps=warps,
    )
    most, warps = down_form
    count = blocks_of(inner)
    span = min(most, triton.next_power_of_2(count))
    _down[(hidden, tokens)](
        out,
        between,
        down,
        down_scale,
        x if down_bias is None else down_bias,
        weights,
        experts,
        inner,
        count,
        hidden,
        out.stride(0),
        down.stride(0),
        down.stride(1),
        TOP_K=top_k,
        SLOTS=triton.next_power_of_2(top_k),
        SPAN=span,
        PIECES=triton.cdiv(count, span),
        BIASED=down_bias is not None,
        INTERPRETED=interpreted(),
        num_warps=warps,
    )
