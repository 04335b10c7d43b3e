"""Sampling and log-probabilities on a GPU, without a sort and without the host.

A row is read by several programs; the last of them to finish picks the winner. Batches with filters go another way
(triton_filter.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus_kernels.device import multiprocessors, power_of_two, scratch
from isthmus_kernels.sampling.triton_filter import MOST_PARTS, filtered
from isthmus_kernels.sampling.triton_noise import gumbel, noise_key, uniform

_PIECE = 2048
_WARPS = 8


@triton.jit
def _choose(
    out,
    logits,
    temperature,
    seeds,
    positions,
    values,  # [rows, PARTS_PAD] fp32
    tokens,  # [rows, PARTS_PAD] int32
    arrived,  # [rows] int32, zero between calls
    vocab,
    span,
    row_stride,
    PIECE: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    RANDOM: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    source = logits + row.to(tl.int64) * row_stride
    heat = 0.0
    if RANDOM:
        heat = tl.load(temperature + row)
        key = noise_key(tl.load(seeds + row), tl.load(positions + row))
    begin = part * span
    end = tl.minimum(begin + span, vocab)
    lane = tl.arange(0, PIECE)
    best = tl.full([PIECE], float("-inf"), tl.float32)
    best_token = begin + lane
    best_logit = best
    bar = tl.max(best, axis=0)
    for base in range(begin, end, PIECE):
        token = base + lane
        logit = tl.load(source + token, mask=token < end, other=float("-inf")).to(tl.float32)
        score = logit
        promising = 1
        if RANDOM:  # noqa: SIM102 - decided when the kernel is compiled
            if heat > 0.0:
                score = tl.div_rn(score, tl.zeros_like(score) + heat)
                u = uniform(key, token)
                # The noise is -log(-log u) and -log u >= 1 - u: once a good token is known, hardly any other needs
                # its logarithms. The factor is for rounding.
                chance = (1.0 - u) <= tl.exp(score - bar) * 1.001
                # So cold that scores overflow: no noise reaches the largest logit, which is not to be missed.
                chance = chance | (score == float("inf")) | (score - bar != score - bar)
                promising = tl.max(chance.to(tl.int32), axis=0)
                if promising > 0:
                    score = score + gumbel(u)
        if promising > 0:
            better = score > best
            if RANDOM:
                better = better | ((score == best) & (tl.abs(score) == float("inf")) & (logit > best_logit))
                best_logit = tl.where(better, logit, best_logit)
            best = tl.where(better, score, best)
            best_token = tl.where(better, token, best_token)
            if RANDOM:
                bar = tl.max(best, axis=0)
    # Equal scores: the first token wins, whichever lane or program read it.
    most = tl.max(best, axis=0)
    ahead = best == most
    if RANDOM:
        # Scores that overflowed are told apart by their logits.
        level = tl.where(ahead & (tl.abs(best) == float("inf")), best_logit, float("-inf"))
        ahead = ahead & (level == tl.max(level, axis=0))
    winner = tl.min(tl.where(ahead, best_token, vocab), axis=0)
    tl.store(values + row * PARTS_PAD + part, most)
    tl.store(tokens + row * PARTS_PAD + part, winner)
    tl.debug_barrier()
    parts = tl.num_programs(1)
    if tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu") == parts - 1:
        index = tl.arange(0, PARTS_PAD)
        spot = row * PARTS_PAD + index
        value = tl.load(values + spot, mask=index < parts, other=float("-inf"), cache_modifier=".cg")
        candidate = tl.load(tokens + spot, mask=index < parts, other=vocab, cache_modifier=".cg")
        top = tl.max(value, axis=0)
        leading = (value == top) & (index < parts)
        if RANDOM:
            overflowed = leading & (tl.abs(value) == float("inf"))
            height = tl.load(source + candidate, mask=overflowed, other=float("-inf")).to(tl.float32)
            leading = leading & (height == tl.max(height, axis=0))
        tl.store(out + row, tl.min(tl.where(leading, candidate, vocab), axis=0).to(tl.int64))
        tl.store(arrived + row, 0)


def sample(
    logits: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Same contract as `reference.sample`."""
    rows, vocab = logits.shape
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    if temperature is not None and not (top_k is None and top_p is None and min_p is None):
        assert seeds is not None and positions is not None
        filtered(logits, temperature, top_k, top_p, min_p, seeds, positions, out)
        return out
    # Enough programs to fill the device twice, each with enough to read.
    wanted = triton.cdiv(4 * multiprocessors(logits.device), rows)
    parts = max(1, min(wanted, MOST_PARTS, triton.cdiv(vocab, _PIECE)))
    span = triton.cdiv(triton.cdiv(vocab, parts), _PIECE) * _PIECE
    parts = triton.cdiv(vocab, span)
    bound = power_of_two(rows)
    values = scratch("sample values", logits.device, (bound, MOST_PARTS), torch.float32)
    tokens = scratch("sample tokens", logits.device, (bound, MOST_PARTS), torch.int32)
    arrived = scratch("sample arrived", logits.device, (bound,), torch.int32)
    _choose[(rows, parts)](
        out,
        logits,
        logits if temperature is None else temperature,
        out if seeds is None else seeds,
        out if positions is None else positions,
        values,
        tokens,
        arrived,
        vocab,
        span,
        logits.stride(0),
        PIECE=_PIECE,
        PARTS_PAD=MOST_PARTS,
        RANDOM=temperature is not None,
        num_warps=_WARPS,
    )
    return out


@triton.jit
def _normalise(chosen, rank, totals, logits, tokens, vocab, row_stride, PIECE: tl.constexpr):
    row = tl.program_id(0)
    source = logits + row.to(tl.int64) * row_stride
    token = tl.load(tokens + row)
    own = tl.load(source + token).to(tl.float32)
    lane = tl.arange(0, PIECE)
    peak = tl.full([PIECE], float("-inf"), tl.float32)
    total = tl.zeros([PIECE], tl.float32)
    above = tl.zeros([PIECE], tl.int32)
    for base in range(0, vocab, PIECE):
        score = tl.load(source + base + lane, mask=base + lane < vocab, other=float("-inf")).to(tl.float32)
        above += (score > own).to(tl.int32)
        higher = tl.maximum(peak, score)
        height = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(peak - height) + tl.exp(score - height)
        peak = higher
    most = tl.max(peak, axis=0)
    height = tl.where(most == float("-inf"), 0.0, most)
    log_total = height + tl.log(tl.sum(total * tl.exp(peak - height), axis=0))
    tl.store(totals + row, log_total)
    tl.store(chosen + row, own - log_total)
    # The best token has rank 1; equal logits share the better rank.
    tl.store(rank + row, (tl.sum(above, axis=0) + 1).to(tl.int64))


def logprobs(logits: Tensor, tokens: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Same contract as `reference.logprobs`."""
    rows, vocab = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    chosen = torch.empty(rows, dtype=torch.float32, device=logits.device)
    totals = torch.empty_like(chosen)
    rank = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows > 0:
        _normalise[(rows,)](
            chosen,
            rank,
            totals,
            logits,
            tokens,
            vocab,
            logits.stride(0),
            PIECE=4096,
            num_warps=16,
        )
    top, ids = logits.topk(top_n, dim=-1)
    return chosen, rank, ids, top.float() - totals[:, None]
