"""Experts on so few pairs that each pair reads its expert's weights: scalar products, each thread streams its share."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus_kernels.device import power_of_two
from isthmus_kernels.moe.triton_product import activated


@triton.jit
def _up(out, x, weight, scales, bias, experts, alpha, most, inner, columns, x_row, weight_expert, weight_row,
        TOP_K: tl.constexpr, CHANNELS: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, EVEN: tl.constexpr,
        SCALED: tl.constexpr, BIASED: tl.constexpr, CLAMPED: tl.constexpr):  # fmt: skip
    """One program a pair and few channels: gate and up of its expert, and their product."""
    pair = tl.program_id(1)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < inner
    expert = tl.load(experts + pair).to(tl.int64)
    rows = (weight + expert * weight_expert + channel.to(tl.int64) * weight_row)[:, None]
    step = inner.to(tl.int64) * weight_row
    source = x + (pair // TOP_K).to(tl.int64) * x_row
    gate = tl.zeros([CHANNELS, PIECE], tl.float32)
    up = tl.zeros([CHANNELS, PIECE], tl.float32)
    for piece in tl.static_range(PIECES):
        column = piece * PIECE + tl.arange(0, PIECE)
        if EVEN:
            first = tl.load(rows + column[None, :], mask=real[:, None], other=0.0)
            second = tl.load(rows + step + column[None, :], mask=real[:, None], other=0.0)
            value = tl.load(source + column)
        else:
            inside = real[:, None] & (column < columns)[None, :]
            first = tl.load(rows + column[None, :], mask=inside, other=0.0)
            second = tl.load(rows + step + column[None, :], mask=inside, other=0.0)
            value = tl.load(source + column, mask=column < columns, other=0.0)
        wide = value.to(tl.float32)[None, :]
        gate += first.to(tl.float32) * wide
        up += second.to(tl.float32) * wide
    left, right = tl.sum(gate, axis=1), tl.sum(up, axis=1)
    added = expert * (2 * inner) + channel
    if SCALED:
        left *= tl.load(scales + added, mask=real, other=0.0)
        right *= tl.load(scales + added + inner, mask=real, other=0.0)
    if BIASED:
        left += tl.load(bias + added, mask=real, other=0.0).to(tl.float32)
        right += tl.load(bias + added + inner, mask=real, other=0.0).to(tl.float32)
    result = activated(left, right, alpha, most, CLAMPED)
    tl.store(out + pair.to(tl.int64) * inner + channel, result.to(out.dtype.element_ty), mask=real)


@triton.jit
def _down(out, between, weight, scales, bias, weights, experts, inner, out_row, weight_expert, weight_row, bias_row,
          TOP_K: tl.constexpr, SLOTS: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, EVEN: tl.constexpr,
          SCALED: tl.constexpr, BIASED: tl.constexpr):  # fmt: skip
    """One program a token and channel: the products of all its experts, weighted and added."""
    channel, token = tl.program_id(0), tl.program_id(1)
    slot = tl.arange(0, SLOTS)
    real = slot < TOP_K
    pair = token * TOP_K + slot
    expert = tl.load(experts + pair, mask=real, other=0).to(tl.int64)
    share = tl.load(weights + pair, mask=real, other=0.0)
    rows = weight + expert * weight_expert + channel.to(tl.int64) * weight_row
    sources = between + pair.to(tl.int64) * inner
    acc = tl.zeros([SLOTS, PIECE], tl.float32)
    for piece in tl.static_range(PIECES):
        column = piece * PIECE + tl.arange(0, PIECE)
        inside = real[:, None]
        if not EVEN:
            inside = inside & (column < inner)[None, :]
        factor = tl.load(rows[:, None] + column[None, :], mask=inside, other=0.0)
        value = tl.load(sources[:, None] + column[None, :], mask=inside, other=0.0)
        acc += factor.to(tl.float32) * value.to(tl.float32)
    result = tl.sum(acc, axis=1)
    if SCALED:
        result *= tl.load(scales + expert * bias_row + channel, mask=real, other=0.0)
    if BIASED:
        result += tl.load(bias + expert * bias_row + channel, mask=real, other=0.0).to(tl.float32)
    total = tl.sum(result * share, axis=0)
    tl.store(out + token.to(tl.int64) * out_row + channel, total.to(out.dtype.element_ty))


def up_form(hidden: int, scaled: bool) -> tuple[int, int, int]:
    """Channels of gate and of up of a program, columns of a piece and warps. Measured on an H200
    (runtime/bench/LOG.md), as the other."""
    if hidden % 1024:
        return 1, min(256, power_of_two(hidden, 128)), 2
    return 2 if scaled else 1, 1024, 2


def down_form(inner: int, scaled: bool) -> tuple[int, int]:
    """Columns of a piece and warps."""
    if inner % 256 or inner > 1024:
        return min(128, power_of_two(inner, 32)), 4
    return (256, 2) if scaled else (128, 1)


def moe_pairs(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate_up_scale: Tensor | None,
    down_scale: Tensor | None,
    clamp: tuple[float, float] | None,
    out: Tensor,
) -> None:
    """The mixture by two launches that need no list of pairs. With 8-bit weights, x stays as it is."""
    tokens, top_k = experts.shape
    _, hidden, inner = down.shape
    between = torch.empty((tokens * top_k, inner), dtype=x.dtype, device=x.device)
    channels, piece, warps = up_form(hidden, gate_up_scale is not None)
    _up[(triton.cdiv(inner, channels), tokens * top_k)](
        between,
        x,
        gate_up,
        gate_up if gate_up_scale is None else gate_up_scale,
        gate_up if gate_up_bias is None else gate_up_bias,
        experts,
        *(clamp or (1.0, 0.0)),
        inner,
        hidden,
        x.stride(0),
        gate_up.stride(0),
        gate_up.stride(1),
        TOP_K=top_k,
        CHANNELS=channels,
        PIECE=piece,
        PIECES=triton.cdiv(hidden, piece),
        EVEN=hidden % piece == 0,
        SCALED=gate_up_scale is not None,
        BIASED=gate_up_bias is not None,
        CLAMPED=clamp is not None,
        num_warps=warps,
    )
    piece, warps = down_form(inner, down_scale is not None)
    _down[(hidden, tokens)](
        out,
        between,
        down,
        down if down_scale is None else down_scale,
        down if down_bias is None else down_bias,
        weights,
        experts,
        inner,
        out.stride(0),
        down.stride(0),
        down.stride(1),
        hidden,
        TOP_K=top_k,
        SLOTS=power_of_two(top_k),
        PIECE=piece,
        PIECES=triton.cdiv(inner, piece),
        EVEN=inner % piece == 0,
        SCALED=down_scale is not None,
        BIASED=down_bias is not None,
        num_warps=warps,
    )
