"""Draws from rows with filters: exact thresholds, found among the few tokens that can matter.

1. `_peak`: the largest logit of each part of a row.
2. `_count`: how many tokens, and how much probability, lie within each of eight distances of the row's peak. The last
   program of a row picks the nearest distance that surely holds all that the filters may keep.
3. `_gather`: the tokens within that distance, in the order of the vocabulary.
4. `_draw`: one program a row descends to each filter's threshold by counting among them, and draws.

A row is read three times, by as many programs as fill the device; nothing is sorted, and sums are made in a fixed
order, so a row's token does not depend on its batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus_kernels import batch_invariance
from isthmus_kernels.device import multiprocessors, power_of_two, scratch
from isthmus_kernels.sampling.triton_noise import gumbel, noise_key, uniform

_EDGES = 8
_PIECE = 1024
_WARPS = 8
_GATHER_PIECE = 4096
_DRAW_PIECE = 4096
_DRAW_WARPS = 16
# One compiled form for every batch: tables of parts have this width.
MOST_PARTS = 64


@triton.jit
def _order(x):
    """An int32 that orders as fp32 `x` does; -0 counts as 0. Its own inverse on bits."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(order):
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _scores(source, token, inside, heat):
    """Logits over temperature (as they are where it is 0); -inf for what can never be drawn."""
    score = tl.load(source + token, mask=inside, other=float("-inf")).to(tl.float32)
    if heat > 0.0:
        score = tl.div_rn(score, tl.zeros_like(score) + heat)
        score = tl.where(tl.abs(score) < float("inf"), score, float("-inf"))
    return score


@triton.jit
def _edges(peak, EDGES: tl.constexpr):
    """Scores at growing distances below `peak`; the last one is below everything."""
    index = tl.arange(0, EDGES).to(tl.float32)
    return tl.where(index == EDGES - 1, float("-inf"), peak - (1.0 + index + 0.3 * index * index))


@triton.jit
def _peak(peaks, logits, vocab, span, row_stride, PARTS_PAD: tl.constexpr, PIECE: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    source = logits + row.to(tl.int64) * row_stride
    end = tl.minimum(part * span + span, vocab)
    best = tl.full([PIECE], float("-inf"), tl.float32)
    for base in range(part * span, end, PIECE):
        token = base + tl.arange(0, PIECE)
        best = tl.maximum(best, _scores(source, token, token < end, 0.0))
    tl.store(peaks + row * PARTS_PAD + part, tl.max(best, axis=0))


@triton.jit
def _row_peak(peaks, temperature, row, parts, PARTS_PAD: tl.constexpr):
    """The row's largest score and its temperature, which is 0 where scores overflow: so cold that all but the largest
    logit are out of reach of any noise."""
    index = tl.arange(0, PARTS_PAD)
    logit = tl.max(tl.load(peaks + row * PARTS_PAD + index, mask=index < parts, other=float("-inf")), axis=0)
    heat = tl.load(temperature + row)
    score = tl.div_rn(logit, tl.where(heat > 0.0, heat, 1.0))
    cold = tl.abs(score) == float("inf")
    return tl.where(cold, logit, score), tl.where(cold, 0.0, heat)


@triton.jit
def _count(
    counts,  # [rows, PARTS_PAD, EDGES] int32: tokens of a part at or above each edge
    masses,  # [rows, PARTS_PAD, EDGES] fp32
    chosen,  # [rows] int32: the edge that is near enough
    totals,  # [rows] fp32
    arrived,  # [rows] int32, zero between calls
    peaks,
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    vocab,
    span,
    row_stride,
    PARTS_PAD: tl.constexpr,
    PIECE: tl.constexpr,
    EDGES: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    parts = tl.num_programs(1)
    source = logits + row.to(tl.int64) * row_stride
    peak, heat = _row_peak(peaks, temperature, row, parts, PARTS_PAD)
    edge = _edges(peak, EDGES)
    end = tl.minimum(part * span + span, vocab)
    count = tl.zeros([EDGES, PIECE], tl.int32)
    mass = tl.zeros([EDGES, PIECE], tl.float32)
    for base in range(part * span, end, PIECE):
        token = base + tl.arange(0, PIECE)
        score = _scores(source, token, token < end, heat)
        above = (score[None, :] >= edge[:, None]) & (score > float("-inf"))[None, :]
        count += above.to(tl.int32)
        mass += tl.where(above, tl.exp(score - peak)[None, :], 0.0)
    index = tl.arange(0, EDGES)
    spot = (row * PARTS_PAD + part) * EDGES + index
    tl.store(counts + spot, tl.sum(count, axis=1))
    tl.store(masses + spot, tl.sum(mass, axis=1))
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu") == parts - 1:
        piece = tl.arange(0, PARTS_PAD)
        spots = (row * PARTS_PAD + piece)[:, None] * EDGES + index[None, :]
        held = (piece < parts)[:, None]
        number = tl.sum(tl.load(counts + spots, mask=held, other=0, cache_modifier=".cg"), axis=0)
        weight = tl.sum(tl.load(masses + spots, mask=held, other=0.0, cache_modifier=".cg"), axis=0)
        total = tl.max(weight, axis=0)
        # Every filter alone bounds what all of them keep: the nearest edge that satisfies one of them will do.
        nearest = tl.full([1], EDGES - 1, tl.int32)
        if TOP_K:
            limit = tl.load(top_k + row)
            if (limit > 0) & (limit < vocab):
                nearest = tl.minimum(nearest, tl.min(tl.where(number >= limit, index, EDGES - 1), axis=0))
        if TOP_P:
            share = tl.load(top_p + row)
            if share < 1.0:
                needed = total * share * 1.0001
                nearest = tl.minimum(nearest, tl.min(tl.where(weight >= needed, index, EDGES - 1), axis=0))
        if MIN_P:
            ratio = tl.load(min_p + row)
            if ratio > 0.0:
                least = peak + tl.log(ratio)
                nearest = tl.minimum(nearest, tl.min(tl.where(edge <= least, index, EDGES - 1), axis=0))
        if heat == 0.0:
            nearest = nearest * 0
        tl.store(chosen + row + tl.arange(0, 1), nearest)
        tl.store(totals + row, total)
        tl.store(arrived + row, 0)


@triton.jit
def _gather(
    kept,  # [rows, vocab] int32: tokens at or above the chosen edge
    kept_scores,  # [rows, vocab] fp32: theirs
    numbers,  # [rows] int32: how many
    counts,
    chosen,
    peaks,
    logits,
    temperature,
    vocab,
    span,
    row_stride,
    PARTS_PAD: tl.constexpr,
    PIECE: tl.constexpr,
    EDGES: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    parts = tl.num_programs(1)
    source = logits + row.to(tl.int64) * row_stride
    nearest = tl.load(chosen + row)
    peak, heat = _row_peak(peaks, temperature, row, parts, PARTS_PAD)
    edges = _edges(peak, EDGES)
    edge = tl.min(tl.where(tl.arange(0, EDGES) == nearest, edges, float("inf")), axis=0)
    piece = tl.arange(0, PARTS_PAD)
    number = tl.load(counts + (row * PARTS_PAD + piece) * EDGES + nearest, mask=piece < parts, other=0)
    place = tl.sum(tl.where(piece < part, number, 0), axis=0)
    if part == 0:
        tl.store(numbers + row, tl.sum(number, axis=0))
    target = row.to(tl.int64) * vocab
    end = tl.minimum(part * span + span, vocab)
    for base in range(part * span, end, PIECE):
        token = base + tl.arange(0, PIECE)
        score = _scores(source, token, token < end, heat)
        above = (score >= edge) & (score > float("-inf"))
        rank = tl.cumsum(above.to(tl.int32), axis=0)
        spot = target + place + rank - 1
        tl.store(kept + spot, token, mask=above)
        tl.store(kept_scores + spot, score, mask=above)
        place += tl.max(rank, axis=0)


@triton.jit
def _descend(scores, number, peak, low, high, target, WEIGHED: tl.constexpr, PIECE: tl.constexpr):
    """The least integer v in (low, high] such that what is above v is less than `target`, knowing that v exists.

    What is above v is Σ exp(score - peak) when WEIGHED, else how many, of the `number` scores at `scores`. `low` and
    `high` are int64 scalars.
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
        for base in range(0, number, PIECE):
            index = base + tl.arange(0, PIECE)
            score = tl.load(scores + index, mask=index < number, other=float("-inf"))
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


@triton.jit(do_not_specialize=["parts"])
def _draw(
    out,
    kept,
    kept_scores,
    numbers,
    totals,
    peaks,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    vocab,
    parts,
    PARTS_PAD: tl.constexpr,
    PIECE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
):
    row = tl.program_id(0)
    own = kept + row.to(tl.int64) * vocab
    scores = kept_scores + row.to(tl.int64) * vocab
    number = tl.load(numbers + row)
    peak, heat = _row_peak(peaks, temperature, row, parts, PARTS_PAD)
    lane = tl.arange(0, PIECE)
    least = tl.minimum(peak, float("-inf"))
    if heat > 0.0:
        low = _order(least).to(tl.int64)
        high = _order(peak).to(tl.int64)
        all_of_it = True
        if MIN_P:
            share = tl.load(min_p + row)
            if share > 0.0:
                least = peak + tl.log(share)
                all_of_it = False
        if TOP_K:
            limit = tl.load(top_k + row)
            if (limit > 0) & (limit < vocab):
                found = _descend(scores, number, peak, low, high, limit.to(tl.float32), False, PIECE)
                least = tl.maximum(least, _value(found.to(tl.int32)))
                all_of_it = False
        if TOP_P:
            part = tl.load(top_p + row)
            if part < 1.0:
                mass = tl.zeros([PIECE], tl.float32)
                for base in range(0, number, PIECE):
                    score = tl.load(scores + base + lane, mask=base + lane < number, other=float("-inf"))
                    mass += tl.where(score >= least, tl.exp(score - peak), 0.0)
                total = tl.sum(mass, axis=0)
                if all_of_it:
                    total = tl.load(totals + row)
                floor = tl.maximum(_order(least).to(tl.int64) - 1, low)
                target = total * tl.maximum(part, 1e-30)
                found = _descend(scores, number, peak, floor, high, target, True, PIECE)
                least = tl.maximum(least, _value(found.to(tl.int32)))
    key = noise_key(tl.load(seeds + row), tl.load(positions + row))
    best = tl.full([PIECE], float("-inf"), tl.float32)
    best_token = tl.zeros([PIECE], tl.int32) + vocab
    for base in range(0, number, PIECE):
        token = tl.load(own + base + lane, mask=base + lane < number, other=0)
        score = tl.load(scores + base + lane, mask=base + lane < number, other=float("-inf"))
        if heat > 0.0:
            score = tl.where(score >= least, score + gumbel(uniform(key, token)), float("-inf"))
        better = score > best
        best = tl.where(better, score, best)
        best_token = tl.where(better, token, best_token)
    most = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == most, best_token, vocab), axis=0)
    # A row without one finite logit has no candidates: its first token, as everywhere.
    tl.store(out + row, tl.where(winner < vocab, winner, 0).to(tl.int64))


def filtered(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    out: Tensor,
) -> None:
    """Write the token of each row of `logits` ``[B, V]`` (contiguous rows), as `dispatch_logits.sample` says."""
    rows, vocab = logits.shape
    device = logits.device
    alike = batch_invariance.required(device)
    # The weights of parts are summed up: their number is part of the order.
    wanted = MOST_PARTS if alike else triton.cdiv(4 * multiprocessors(device), rows)
    parts = max(1, min(wanted, MOST_PARTS, triton.cdiv(vocab, _PIECE)))
    span = triton.cdiv(triton.cdiv(vocab, parts), _PIECE) * _PIECE
    parts = triton.cdiv(vocab, span)
    arrived = scratch("filter arrived", device, (power_of_two(rows),), torch.int32)
    peaks = torch.empty((rows, MOST_PARTS), dtype=torch.float32, device=device)
    counts = torch.empty((rows, MOST_PARTS, _EDGES), dtype=torch.int32, device=device)
    masses = torch.empty((rows, MOST_PARTS, _EDGES), dtype=torch.float32, device=device)
    # Two, for both to begin at a multiple of 16 bytes: Triton compiles a kernel once more where one does not.
    chosen, numbers = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(2))
    totals = torch.empty(rows, dtype=torch.float32, device=device)
    kept = torch.empty((rows, vocab), dtype=torch.int32, device=device)
    kept_scores = torch.empty((rows, vocab), dtype=torch.float32, device=device)
    ks, ps, ms = (logits if tensor is None else tensor for tensor in (top_k, top_p, min_p))
    on = {"TOP_K": top_k is not None, "TOP_P": top_p is not None, "MIN_P": min_p is not None}
    grid, stride = (rows, parts), logits.stride(0)
    _peak[grid](peaks, logits, vocab, span, stride, PARTS_PAD=MOST_PARTS, PIECE=_PIECE, num_warps=_WARPS)
    _count[grid](
        counts,
        masses,
        chosen,
        totals,
        arrived,
        peaks,
        logits,
        temperature,
        ks,
        ps,
        ms,
        vocab,
        span,
        stride,
        PARTS_PAD=MOST_PARTS,
        PIECE=_PIECE,
        EDGES=_EDGES,
        num_warps=_WARPS,
        **on,
    )
    _gather[grid](
        kept,
        kept_scores,
        numbers,
        counts,
        chosen,
        peaks,
        logits,
        temperature,
        vocab,
        span,
        stride,
        PARTS_PAD=MOST_PARTS,
        PIECE=_GATHER_PIECE,
        EDGES=_EDGES,
        num_warps=_WARPS,
    )
    _draw[(rows,)](
        out,
        kept,
        kept_scores,
        numbers,
        totals,
        peaks,
        temperature,
        ks,
        ps,
        ms,
        seeds,
        positions,
        vocab,
        parts,
        PARTS_PAD=MOST_PARTS,
        PIECE=_DRAW_PIECE,
        num_warps=_DRAW_WARPS,
        **on,
    )
