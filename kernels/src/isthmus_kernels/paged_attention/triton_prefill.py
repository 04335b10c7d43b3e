"""Prefill attention: tiles of queries, all query heads of a kv head together, over the paged context (Dao 2023)."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus_kernels.device import multiprocessors, power_of_two
from isthmus_kernels.paged_attention.triton_tile import LEAST_ROWS, LOG2E, attend_tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a program is cut: rows of (query, head) and keys that it multiplies at a time."""

    rows: int
    tile: int
    warps: int
    stages: int


def plan(row_bytes: int, wide: bool, most_rows: int) -> Plan:
    """The plan for keys of `row_bytes`, in fp32 if `wide`, and `most_rows` that would still fill the device.

    Measured on an H200 for 256 bytes (runtime/bench/LOG.md), the others fit.
    """
    if row_bytes <= 256 and not wide:
        return Plan(rows=256 if most_rows >= 256 else 128, tile=64, warps=8, stages=3)
    if row_bytes <= 256:
        return Plan(rows=64, tile=64, warps=4, stages=3)
    if row_bytes <= 512:
        return Plan(rows=64, tile=32, warps=4, stages=3)
    return Plan(rows=64 if row_bytes <= 1024 else 32, tile=16, warps=4, stages=2)


@triton.jit(do_not_specialize=["rows"])
def _prefill(
    out,
    q,
    kv,
    tables,
    starts,
    lens,
    sinks,  # [q heads] fp32; not read unless SINKS
    scale,
    softcap,
    window,
    rows,
    q_token,
    q_head,
    out_token,
    out_head,
    kv_block,
    kv_part,
    kv_token,
    kv_head,
    scales,  # fp32 [blocks, 2, block size, kv heads]; not read unless SCALED
    scale_block,
    scale_part,
    scale_token,
    scale_head,
    table_row,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    ALIKE: tl.constexpr,
):
    TO_LOG2: tl.constexpr = 1.4426950408889634
    QUERIES: tl.constexpr = M // GROUP
    index = tl.arange(0, ROWS_PAD)
    live = index < rows
    counts = tl.load(starts + index + 1, mask=live, other=0) - tl.load(starts + index, mask=live, other=0)
    counts = tl.where(counts > (0 if ALIKE else 1), (counts + QUERIES - 1) // QUERIES, 0)
    ends = tl.cumsum(counts, axis=0)
    # Later tiles of a prompt see more keys: the longest first, so that the short ones fill the end.
    tile_index = tl.max(ends, axis=0) - 1 - tl.program_id(1)
    if tile_index < 0:
        return
    head = tl.program_id(0)
    request = tl.sum((ends <= tile_index).to(tl.int32), axis=0)
    request_begin = tl.max(tl.where(ends <= tile_index, ends, 0), axis=0)
    start = tl.load(starts + request)
    new = tl.load(starts + request + 1) - start
    seq_len = tl.load(lens + request)

    member = tl.arange(0, M)
    channel = tl.arange(0, DIM_PAD)
    first_query = (tile_index - request_begin) * QUERIES
    query_index = first_query + member // GROUP
    valid = (member < QUERIES * GROUP) & (query_index < new)
    held = valid[:, None] & (channel < DIM)[None, :]
    heads = head * GROUP + member % GROUP
    token = (start + query_index).to(tl.int64)
    query = tl.load(q + token[:, None] * q_token + heads[:, None] * q_head + channel[None, :], mask=held, other=0.0)
    position = seq_len - new + query_index
    lowest = seq_len - new + first_query
    highest = seq_len - new + tl.minimum(first_query + QUERIES, new) - 1
    total = tl.zeros([M], tl.float32)
    peak = tl.full([M], float("-inf"), tl.float32)
    acc = tl.zeros([M, DIM_PAD], tl.float32)
    table = tables + request.to(tl.int64) * table_row
    head_offset = head.to(tl.int64) * kv_head
    scale_head_offset = head.to(tl.int64) * scale_head
    begin = 0
    # Tiles that every query of this program sees whole need no mask.
    whole = (lowest + 1) // TILE
    if WINDOWED:
        begin = tl.maximum(lowest - window + 1, 0)
        whole = 0
    if ALIKE:
        whole = 0  # one form for all tiles: which of them a query shares with others says nothing about its sums
    for tile in range(0, whole):
        total, peak, acc = attend_tile(
            query,
            total,
            peak,
            acc,
            kv,
            table,
            tile * TILE,
            seq_len,
            begin,
            position,
            window,
            scale,
            softcap,
            head_offset,
            kv_block,
            kv_part,
            kv_token,
            scales,
            scale_head_offset,
            scale_block,
            scale_part,
            scale_token,
            DIM,
            DIM_PAD,
            BLOCK_SIZE,
            TILE,
            False,
            True,
            False,
            CAPPED,
            SCALED,
        )
    for tile in range(tl.maximum(whole, begin // TILE), highest // TILE + 1):
        total, peak, acc = attend_tile(
            query,
            total,
            peak,
            acc,
            kv,
            table,
            tile * TILE,
            highest + 1,
            begin,
            position,
            window,
            scale,
            softcap,
            head_offset,
            kv_block,
            kv_part,
            kv_token,
            scales,
            scale_head_offset,
            scale_block,
            scale_part,
            scale_token,
            DIM,
            DIM_PAD,
            BLOCK_SIZE,
            TILE,
            True,
            True,
            WINDOWED,
            CAPPED,
            SCALED,
        )
    if SINKS:
        total += tl.exp2(tl.load(sinks + heads) * TO_LOG2 - peak)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + token[:, None] * out_token + heads[:, None] * out_head + channel[None, :], result, mask=held)


def prefill(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    scales: Tensor | None,
    alike: bool = False,
) -> None:
    """Write `out` for the requests that have more than one query; the others are left alone.

    `alike`: for all requests, by one plan and one form of the loop over keys, so that a query's result depends neither
    on what else is computed nor on how a prompt is cut (`batch_invariance`).
    """
    rows = block_tables.shape[0]
    block_size, kv_heads, dim = kv.shape[2], kv.shape[3], kv.shape[4]
    group = q.shape[1] // kv_heads
    dim_pad = power_of_two(dim, 16)
    most_rows = q.shape[0] * q.shape[1] // multiprocessors(q.device)
    chosen = plan(
        dim_pad * max(q.element_size(), kv.element_size()), q.dtype == torch.float32, 0 if alike else most_rows
    )
    held = max(chosen.rows, power_of_two(group))
    # Each request may leave one tile partly filled.
    tiles = min(q.shape[0] // (held // group) + rows, q.shape[0])
    _prefill[(kv_heads, tiles)](
        out,
        q,
        kv,
        block_tables,
        query_start_loc,
        seq_lens,
        q if sinks is None else sinks,
        scale if softcap is not None else scale * LOG2E,
        softcap or 0.0,
        window or 0,
        rows,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        kv.stride(3),
        q if scales is None else scales,
        *((0, 0, 0, 0) if scales is None else scales.stride()),
        block_tables.stride(0),
        GROUP=group,
        DIM=dim,
        DIM_PAD=dim_pad,
        BLOCK_SIZE=block_size,
        M=held,
        TILE=chosen.tile,
        ROWS_PAD=power_of_two(rows, LEAST_ROWS),
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
        SINKS=sinks is not None,
        SCALED=scales is not None,
        ALIKE=alike,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
    )
