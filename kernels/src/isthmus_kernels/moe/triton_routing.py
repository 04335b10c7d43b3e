"""The choice of experts, and the list of pairs (a token with one of its experts) expert by expert, without the host."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus_kernels.device import power_of_two

# Pairs that one program looks through.
_PIECE = 4096


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
def _count(counts, experts, pairs, PIECE: tl.constexpr, EXPERTS_PAD: tl.constexpr):
    """One program a piece of the pairs: how many of them each expert has."""
    piece = tl.program_id(0)
    index = piece * PIECE + tl.arange(0, PIECE)
    chosen = tl.load(experts + index, mask=index < pairs, other=0)
    found = tl.histogram(chosen, EXPERTS_PAD, mask=index < pairs)
    tl.store(counts + piece * EXPERTS_PAD + tl.arange(0, EXPERTS_PAD), found)


@triton.jit(do_not_specialize=["pairs", "pieces"])
def _arrange(order, places, tiles, experts, counts, pairs, pieces, PIECE: tl.constexpr, EXPERTS: tl.constexpr,
             EXPERTS_PAD: tl.constexpr, TILE: tl.constexpr, ALONE: tl.constexpr, PIECES: tl.constexpr):  # fmt: skip
    """One program an expert and piece: where the expert's pairs of the piece stand in the list. The first piece's
    program also cuts the expert's part of the list into tiles."""
    expert, piece = tl.program_id(0), tl.program_id(1)
    index = piece * PIECE + tl.arange(0, PIECE)
    chosen = tl.load(experts + index, mask=index < pairs, other=EXPERTS)
    bins = tl.arange(0, EXPERTS_PAD)
    earlier = tl.zeros([EXPERTS_PAD], tl.int32)
    if ALONE:
        total = tl.histogram(chosen, EXPERTS_PAD, mask=index < pairs)
    else:
        total = tl.zeros([EXPERTS_PAD], tl.int32)
        # Several pieces' counts at a time: each load waits for memory once.
        for base in range(0, pieces, PIECES):
            other = base + tl.arange(0, PIECES)[:, None]
            found = tl.load(counts + other * EXPERTS_PAD + bins[None, :], mask=other < pieces, other=0)
            total += tl.sum(found, axis=0)
            earlier += tl.sum(tl.where(other < piece, found, 0), axis=0)
    begin = tl.sum(tl.where(bins < expert, total, 0), axis=0)
    count = tl.sum(tl.where(bins == expert, total, 0), axis=0)
    own = (chosen == expert).to(tl.int32)
    place = begin + tl.sum(tl.where(bins == expert, earlier, 0), axis=0) + tl.cumsum(own, axis=0) - 1
    tl.store(order + place, index, mask=own > 0)
    tl.store(places + index, place, mask=own > 0)
    if piece == 0:
        first = tl.sum(tl.where(bins < expert, (total + TILE - 1) // TILE, 0), axis=0)
        mine = (count + TILE - 1) // TILE
        for number in range(mine):
            row = tiles + (1 + first + number) * 4
            tl.store(row, expert)
            tl.store(row + 1, begin + number * TILE)
            tl.store(row + 2, tl.minimum(begin + (number + 1) * TILE, begin + count))
        if expert == EXPERTS - 1:
            tl.store(tiles, first + mine)


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


def most_tiles(pairs: int, experts: int, tile: int) -> int:
    """A bound on the tiles of a list: each expert may leave one partly filled, and none is empty."""
    return min(pairs, pairs // tile + experts)


def arrange(experts: Tensor, count: int, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """List the pairs of `experts` ``[T, k]`` expert by expert, each expert's in the order of the tokens.

    Returns ``order`` int32 ``[T k]``: the pair at each place of the list; ``places``: its inverse; ``tiles`` int32
    ``[1 + most_tiles, 4]``: their number in ``tiles[0, 0]``, then (expert, first place, place past the last, unused)
    of each run of up to `tile` places of one expert.
    """
    pairs = experts.numel()
    order, places = torch.empty((2, pairs), dtype=torch.int32, device=experts.device)
    tiles = torch.empty((1 + most_tiles(pairs, count, tile), 4), dtype=torch.int32, device=experts.device)
    piece = min(_PIECE, power_of_two(pairs, 128))
    pieces = triton.cdiv(pairs, piece)
    pad = power_of_two(count)
    counts = order
    if pieces > 1:
        counts = torch.empty((pieces, pad), dtype=torch.int32, device=experts.device)
        _count[(pieces,)](counts, experts, pairs, PIECE=piece, EXPERTS_PAD=pad, num_warps=4)
    _arrange[(count, pieces)](
        order,
        places,
        tiles,
        experts,
        counts,
        pairs,
        pieces,
        PIECE=piece,
        EXPERTS=count,
        EXPERTS_PAD=pad,
        TILE=tile,
        ALONE=pieces == 1,
        PIECES=min(16, power_of_two(pieces)),
        num_warps=8 if piece > 1024 else 4,
    )
    return order, places, tiles
