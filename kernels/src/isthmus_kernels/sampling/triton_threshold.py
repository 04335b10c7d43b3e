"""The smallest logit (over temperature) that a row's filters keep: exact, by descending through the floats.

Floats are compared as integers of the same order. Every pass over the row counts, for seven values that cut the open
interval into eight, what lies above each; eleven passes leave one value. One program a row; the row stays in L2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_PIECE = 4096
_WARPS = 16


@triton.jit
def _order(x):
    """An int32 that orders as fp32 `x` does; -0 counts as 0. Its own inverse on bits."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(order):
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _scores(source, base, vocab, heat, PIECE: tl.constexpr):
    token = base + tl.arange(0, PIECE)
    score = tl.load(source + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    score = tl.div_rn(score, tl.zeros_like(score) + heat)
    return tl.where(tl.abs(score) < float("inf"), score, float("-inf"))


@triton.jit
def _descend(source, vocab, heat, peak, low, high, target, WEIGHED: tl.constexpr, PIECE: tl.constexpr):
    """The least integer v in (low, high] such that what is above v is less than `target`, knowing that v exists.

    What is above v is Σ exp(score - peak) when WEIGHED, else how many. `low` and `high` are int64 scalars.
    """
    step = tl.arange(0, 8)
    by_value = True
    while high - low > 1:
        # Cuts at equal distances of the values come near quickly where scores lie densely; cuts at equal distances
        # of the integers always end. They take turns.
        bottom, top = _value(low.to(tl.int32)), _value(high.to(tl.int32))
        cut_value = _order(bottom + (top - bottom) * (step.to(tl.float32) * 0.125)).to(tl.int64)
        cut_order = low + (high - low) * step // 8
        cut = tl.where(by_value, cut_value, cut_order)
        cut = tl.minimum(tl.maximum(cut, low), high - 1).to(tl.int32)
        above = tl.zeros([8, PIECE], tl.float32)
        nearest_low = tl.full([PIECE], 0x7FFFFFFF, tl.int32)
        nearest_high = tl.full([PIECE], -0x7FFFFFFF, tl.int32)
        for base in range(0, vocab, PIECE):
            score = _scores(source, base, vocab, heat, PIECE)
            order = _order(score)
            weight = tl.exp(score - peak) if WEIGHED else tl.full([PIECE], 1.0, tl.float32)
            above += tl.where(order[None, :] > cut[:, None], weight[None, :], 0.0)
            nearest_low = tl.minimum(nearest_low, tl.where(order > low, order, 0x7FFFFFFF))
            nearest_high = tl.maximum(nearest_high, tl.where(order <= high, order, -0x7FFFFFFF))
        enough = tl.sum(above, axis=1) >= target
        wide = cut.to(tl.int64)
        new_low = tl.max(tl.where(enough, wide, low), axis=0)
        new_high = tl.min(tl.where(enough, high, wide), axis=0)
        # Values that no token has need no cut.
        low = tl.maximum(new_low, tl.min(nearest_low, axis=0).to(tl.int64) - 1)
        high = tl.maximum(tl.minimum(new_high, tl.max(nearest_high, axis=0).to(tl.int64)), low + 1)
        by_value = not by_value
    return high


@triton.jit
def _threshold(
    thresholds,
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    vocab,
    row_stride,
    PIECE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
):
    row = tl.program_id(0)
    heat = tl.load(temperature + row)
    keep = float("-inf")
    if heat > 0.0:
        source = logits + row.to(tl.int64) * row_stride
        best = tl.full([PIECE], float("-inf"), tl.float32)
        for base in range(0, vocab, PIECE):
            best = tl.maximum(best, _scores(source, base, vocab, heat, PIECE))
        peak = tl.max(best, axis=0)
        lowest = _order(tl.min(tl.full([1], float("-inf"), tl.float32), axis=0)).to(tl.int64)
        high = _order(peak).to(tl.int64)
        if MIN_P:
            share = tl.load(min_p + row)
            if share > 0.0:
                keep = peak + tl.log(share)
        if TOP_K:
            count = tl.load(top_k + row)
            if (count > 0) & (count < vocab):
                limit = _descend(source, vocab, heat, peak, lowest, high, count.to(tl.float32), False, PIECE)
                keep = tl.maximum(keep, _value(limit.to(tl.int32)))
        if TOP_P:
            part = tl.load(top_p + row)
            if part < 1.0:
                mass = tl.zeros([PIECE], tl.float32)
                for base in range(0, vocab, PIECE):
                    score = _scores(source, base, vocab, heat, PIECE)
                    mass += tl.where(score >= keep, tl.exp(score - peak), 0.0)
                target = tl.sum(mass, axis=0) * tl.maximum(part, 1e-30)
                low = tl.maximum(_order(keep).to(tl.int64) - 1, lowest)
                limit = _descend(source, vocab, heat, peak, low, high, target, True, PIECE)
                keep = tl.maximum(keep, _value(limit.to(tl.int32)))
    tl.store(thresholds + row, keep)


def threshold(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """Return fp32 ``[B]``: tokens whose logit over temperature is at least this are kept; -inf where nothing filters.

    `logits` ``[B, V]`` has contiguous rows; the others are as in `dispatch.sample`.
    """
    rows, vocab = logits.shape
    thresholds = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _threshold[(rows,)](
        thresholds,
        logits,
        temperature,
        logits if top_k is None else top_k,
        logits if top_p is None else top_p,
        logits if min_p is None else min_p,
        vocab,
        logits.stride(0),
        PIECE=_PIECE,
        TOP_K=top_k is not None,
        TOP_P=top_p is not None,
        MIN_P=min_p is not None,
        num_warps=_WARPS,
    )
    return thresholds
