"""Decode attention: one query a request, all programs with equal numbers of keys (stream-K; Osama et al. 2023).

The keys of all requests and kv heads form one line of tiles: request by request, head by head. Program p takes tiles
[p·chunk, (p + 1)·chunk) of it, whatever the lengths are, so one long request among short ones costs no more than its
bytes. A (request, head) that lies inside one program is written at once; of one that spans several, each leaves its
partial result, and the last to finish merges them. The number of programs is a property of the device alone.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus_kernels.device import multiprocessors, power_of_two, scratch
from isthmus_kernels.paged_attention.triton_tile import LEAST_ROWS, LOG2E, attend_tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a program is cut. All programs must be resident at once, or the shares are not equal: see `registers`."""

    tile: int
    stages: int
    programs: int  # per multiprocessor
    registers: int | None  # per thread at most
    warps: int = 4
    merged: int = 2048
    """Numbers that a program holds at a time when it merges parts."""


_MANY_ROWS = 16
_SPREAD = 0.5
"""Of the root of a (request, head)'s tiles: the fewest tiles that a program takes."""


def plan(row_bytes: int, wide: bool, rows: int) -> Plan:
    """The plan for keys of `row_bytes`, in fp32 if `wide`, and a batch of `rows`.

    Measured on an H200 for 256 bytes (runtime/bench/LOG.md), the others fit.
    """
    if row_bytes <= 256 and not wide:
        # Single warps need no barrier for the softmax, and eight of them wait for memory at different times.
        programs = 8 if rows >= _MANY_ROWS else 4
        return Plan(tile=32, stages=3, programs=programs, registers=None, warps=1, merged=4096)
    if row_bytes <= 256:
        return Plan(tile=64, stages=5, programs=2, registers=None)
    if row_bytes <= 512:
        return Plan(tile=32, stages=3, programs=2, registers=None)
    return Plan(tile=16, stages=3, programs=2, registers=None)


@triton.jit(do_not_specialize=["rows"])
def _decode(
    out,
    q,
    kv,
    tables,
    starts,
    lens,
    sinks,  # [q heads] fp32; not read unless SINKS
    partial,  # [2 programs, GROUP, DIM_PAD] fp32: of a program's first and of its other unfinished part
    stats,  # [2 programs, 2, GROUP] fp32: maximum and sum
    arrived,  # [programs] int32, zero between calls: parts left of the (request, head) that begins in the program
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
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
    MERGED_PARTS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    SPREAD: tl.constexpr,
):
    TO_LOG2: tl.constexpr = 1.4426950408889634
    program = tl.program_id(0)
    index = tl.arange(0, ROWS_PAD)
    live = index < rows
    length = tl.load(lens + index, mask=live, other=0)
    queries = tl.load(starts + index + 1, mask=live, other=0) - tl.load(starts + index, mask=live, other=0)
    length = tl.where(queries == 1, length, 0)
    counts = (length + TILE - 1) // TILE
    if WINDOWED:
        counts -= tl.maximum(length - window, 0) // TILE
    ends = tl.cumsum(counts, axis=0) * KV_HEADS
    line = tl.max(ends, axis=0)
    # With few requests there are programs for every tile, but a tile takes about as long as the merge of four parts:
    # c tiles and n / 4 c parts are done soonest with c at half the root of n.
    least = (tl.sqrt(tl.max(counts, axis=0).to(tl.float32)) * SPREAD).to(tl.int32)
    chunk = tl.maximum(tl.cdiv(line, tl.num_programs(0)), least)
    begin = program * chunk
    end = tl.minimum(begin + chunk, line)

    member = tl.arange(0, GROUP_PAD)
    channel = tl.arange(0, DIM_PAD)
    held = (member < GROUP)[:, None] & (channel < DIM)[None, :]
    at = begin
    while at < end:
        request = tl.sum((ends <= at).to(tl.int32), axis=0)
        request_begin = tl.max(tl.where(ends <= at, ends, 0), axis=0)
        seq_len = tl.load(lens + request)
        low = 0
        if WINDOWED:
            low = tl.maximum(seq_len - window, 0)
        tiles = tl.cdiv(seq_len, TILE) - low // TILE
        head = (at - request_begin) // tiles
        head_begin = request_begin + head * tiles
        stop = tl.minimum(head_begin + tiles, end)

        token = tl.load(starts + request).to(tl.int64)
        heads = head * GROUP + member
        query = tl.load(q + token * q_token + heads[:, None] * q_head + channel[None, :], mask=held, other=0.0)
        total = tl.zeros([GROUP_PAD], tl.float32)
        peak = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
        table = tables + request.to(tl.int64) * table_row
        head_offset = head.to(tl.int64) * kv_head
        scale_head_offset = head.to(tl.int64) * scale_head
        first = low // TILE + at - head_begin
        for tile in range(first, first + stop - at):
            total, peak, acc = attend_tile(
                query,
                total,
                peak,
                acc,
                kv,
                table,
                tile * TILE,
                seq_len,
                low,
                peak,
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
                False,
                WINDOWED,
                CAPPED,
                SCALED,
            )

        target = out + token * out_token
        if stop - at == tiles:
            if SINKS:
                total += tl.exp2(tl.load(sinks + heads, mask=member < GROUP, other=0.0) * TO_LOG2 - peak)
            result = (acc / total[:, None]).to(out.dtype.element_ty)
            tl.store(target + heads[:, None] * out_head + channel[None, :], result, mask=held)
        else:
            slot = (2 * program + (at > begin).to(tl.int32)).to(tl.int64)
            spot = slot * (GROUP * DIM_PAD) + member[:, None] * DIM_PAD + channel[None, :]
            tl.store(partial + spot, acc, mask=held)
            tl.store(stats + slot * (2 * GROUP) + member, peak, mask=member < GROUP)
            tl.store(stats + slot * (2 * GROUP) + GROUP + member, total, mask=member < GROUP)
            # All threads have stored before one of them says so.
            tl.debug_barrier()
            first_program = head_begin // chunk
            last_program = (head_begin + tiles - 1) // chunk
            before = tl.atomic_add(arrived + first_program, 1, sem="acq_rel", scope="gpu")
            if before == last_program - first_program:
                own = tl.arange(0, MERGED_ROWS)
                real = own < GROUP
                spread = own[:, None] * DIM_PAD + channel[None, :]
                most = tl.full([MERGED_ROWS], float("-inf"), tl.float32)
                weight = tl.zeros([MERGED_ROWS], tl.float32)
                value = tl.zeros([MERGED_ROWS, DIM_PAD], tl.float32)
                for base in range(first_program, last_program + 1, MERGED_PARTS):
                    part = base + tl.arange(0, MERGED_PARTS)
                    second = (part == first_program) & (part * chunk < head_begin)
                    source = (2 * part + second.to(tl.int32)).to(tl.int64)
                    use = (part <= last_program)[:, None] & real[None, :]
                    # From L2: another multiprocessor wrote these.
                    numbers = stats + source[:, None] * (2 * GROUP) + own[None, :]
                    peaks = tl.load(numbers, mask=use, other=float("-inf"), cache_modifier=".cg")
                    sums = tl.load(numbers + GROUP, mask=use, other=0.0, cache_modifier=".cg")
                    spots = partial + source[:, None, None] * (GROUP * DIM_PAD) + spread[None, :, :]
                    values = tl.load(spots, mask=use[:, :, None], other=0.0, cache_modifier=".cg")
                    higher = tl.maximum(most, tl.max(peaks, axis=0))
                    level = tl.where(real, higher, 0.0)
                    share = tl.exp2(peaks - level[None, :])
                    fade = tl.exp2(most - level)
                    weight = weight * fade + tl.sum(sums * share, axis=0)
                    value = value * fade[:, None] + tl.sum(values * share[:, :, None], axis=0)
                    most = higher
                if SINKS:
                    sink = tl.load(sinks + head * GROUP + own, mask=real, other=0.0)
                    weight += tl.where(real, tl.exp2(sink * TO_LOG2 - most), 0.0)
                merged = (value / tl.where(real, weight, 1.0)[:, None]).to(out.dtype.element_ty)
                own_heads = (head * GROUP + own)[:, None] * out_head + channel[None, :]
                tl.store(target + own_heads, merged, mask=real[:, None] & (channel < DIM)[None, :])
                tl.store(arrived + first_program, 0)
        at = stop


def decode(
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
) -> None:
    """Write `out` for the requests that have exactly one query; the others are left alone."""
    rows = block_tables.shape[0]
    block_size, kv_heads, dim = kv.shape[2], kv.shape[3], kv.shape[4]
    group = q.shape[1] // kv_heads
    dim_pad = power_of_two(dim, 16)
    chosen = plan(dim_pad * max(q.element_size(), kv.element_size()), q.dtype == torch.float32, rows)
    programs = chosen.programs * multiprocessors(q.device)
    merged_rows = power_of_two(group)
    partial = scratch("decode partial", q.device, (2 * programs, group, dim_pad), torch.float32)
    stats = scratch("decode stats", q.device, (2 * programs, 2, group), torch.float32)
    arrived = scratch("decode arrived", q.device, (programs,), torch.int32)
    _decode[(programs,)](
        out,
        q,
        kv,
        block_tables,
        query_start_loc,
        seq_lens,
        q if sinks is None else sinks,
        partial,
        stats,
        arrived,
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
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_PAD=power_of_two(group, 16),
        DIM=dim,
        DIM_PAD=dim_pad,
        BLOCK_SIZE=block_size,
        TILE=chosen.tile,
        ROWS_PAD=power_of_two(rows, LEAST_ROWS),
        MERGED_ROWS=merged_rows,
        MERGED_PARTS=max(1, chosen.merged // (merged_rows * dim_pad)),
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
        SINKS=sinks is not None,
        SCALED=scales is not None,
        SPREAD=_SPREAD,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
        maxnreg=chosen.registers,
    )
