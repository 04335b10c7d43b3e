"""One step of the online softmax over a tile of paged keys: shared by decode and prefill."""

import triton
import triton.language as tl

LOG2E = 1.4426950408889634
# Requests that the kernels look through at least: one compiled form for all smaller batches.
LEAST_ROWS = 256


@triton.jit
def attend_tile(
    query,  # [M, DIM_PAD] in the dtype of the product
    total,  # [M] running sum of weights
    peak,  # [M] running maximum of scores, in units of log2
    acc,  # [M, DIM_PAD] fp32
    kv,  # pointer to head 0 of the layer's keys
    table,  # pointer to the request's row of the block table
    first,  # position of the tile's first key
    end,  # keys at or past this position are not read
    begin,  # keys before this position are not read
    position,  # [M] position of each query
    window,
    scale,  # positive factor on q·k; times log2(e) unless there is a soft cap
    softcap,
    head_offset,  # int64, of the kv head
    kv_block,
    kv_part,
    kv_token,
    scales,  # pointer to head 0 of the layer's scales; not read unless SCALED
    scale_head_offset,  # int64, of the kv head
    scale_block,
    scale_part,
    scale_token,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
):
    TO_LOG2: tl.constexpr = 1.4426950408889634
    key = first + tl.arange(0, TILE)
    channel = tl.arange(0, DIM_PAD)
    if MASKED:
        inside = (key < end) & (key >= begin)
        block = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    else:
        block = tl.load(table + key // BLOCK_SIZE).to(tl.int64)
    row = kv + block * kv_block + (key % BLOCK_SIZE).to(tl.int64) * kv_token + head_offset
    keys = row[:, None] + channel[None, :]
    # Memory that is not part of the context may hold anything: it is replaced before any arithmetic (0 · NaN = NaN).
    if MASKED and DIM == DIM_PAD:
        k = tl.load(keys, mask=inside[:, None], other=0.0)
        v = tl.load(keys + kv_part, mask=inside[:, None], other=0.0)
    elif MASKED:
        k = tl.load(keys, mask=inside[:, None] & (channel < DIM)[None, :], other=0.0)
        v = tl.load(keys + kv_part, mask=inside[:, None] & (channel < DIM)[None, :], other=0.0)
    elif DIM == DIM_PAD:
        k = tl.load(keys)
        v = tl.load(keys + kv_part)
    else:
        k = tl.load(keys, mask=(channel < DIM)[None, :], other=0.0)
        v = tl.load(keys + kv_part, mask=(channel < DIM)[None, :], other=0.0)
    # fp32 goes through the tensor cores in three parts, which keeps its accuracy.
    scores = tl.dot(query, tl.trans(k.to(query.dtype)), input_precision="tf32x3")
    if SCALED:
        # A key's scale leaves its products, a value's goes into its weight.
        of_key = scales + block * scale_block + (key % BLOCK_SIZE).to(tl.int64) * scale_token + scale_head_offset
        if MASKED:
            k_scale = tl.load(of_key, mask=inside, other=0.0)
            v_scale = tl.load(of_key + scale_part, mask=inside, other=0.0)
        else:
            k_scale = tl.load(of_key)
            v_scale = tl.load(of_key + scale_part)
        scores = scores * k_scale[None, :]
    if CAPPED:
        # cap · tanh(s / cap), in the form that neither overflows nor needs a library
        scores = softcap * TO_LOG2 * (1.0 - 2.0 / (tl.exp2(scores * (scale * 2.0 * TO_LOG2 / softcap)) + 1.0))
        factor = 1.0
    else:
        factor = scale
    if MASKED:
        visible = inside[None, :]
        if CAUSAL:
            visible = visible & (key[None, :] <= position[:, None])
        if CAUSAL and WINDOWED:
            visible = visible & (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1) * factor)
    if WINDOWED and CAUSAL:
        # A query whose window begins in a later tile has seen nothing yet.
        base = tl.where(higher == float("-inf"), 0.0, higher)
    else:
        base = higher
    weights = tl.exp2(scores * factor - base[:, None])
    fade = tl.exp2(peak - base)
    total = total * fade + tl.sum(weights, axis=1)
    acc = acc * fade[:, None]
    if SCALED:
        weights = weights * v_scale[None, :]
    acc = tl.dot(weights.to(query.dtype), v.to(query.dtype), acc, input_precision="tf32x3")
    return total, higher, acc
