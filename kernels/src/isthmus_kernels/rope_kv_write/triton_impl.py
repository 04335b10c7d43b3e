"""Norm, rotary embedding and KV write on a GPU, in one pass: a program takes some heads of one token."""

import triton
import triton.language as tl
from torch import Tensor

from isthmus_kernels.device import power_of_two

_HEADS = 8
_WARPS = 1


@triton.jit
def _rope_kv_write(
    qkv,
    positions,
    cos,
    sin,
    kv,
    slots,
    q_weight,
    k_weight,
    eps,
    qkv_token,
    cos_row,
    sin_row,
    kv_block,
    kv_part,
    kv_token,
    kv_head,
    scales,  # fp32 [blocks, 2, block size, kv heads]; not written unless SCALED
    scale_block,
    scale_part,
    scale_token,
    scale_head,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    SCALED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_q = head < Q_HEADS
    is_k = (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    is_v = (head >= Q_HEADS + KV_HEADS) & (head < Q_HEADS + 2 * KV_HEADS)
    rotated = is_q | is_k

    # A head is three pieces: the two halves that turn into each other, and the rest, which stays.
    half = tl.arange(0, HALF_PAD)
    in_half = (half < HALF)[None, :]
    live = (rotated | is_v)[:, None]
    source = qkv + token * qkv_token + head[:, None] * DIM
    first = tl.load(source + half[None, :], mask=live & in_half, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + half[None, :], mask=live & in_half, other=0.0).to(tl.float32)
    if REST_PAD > 0:
        rest = 2 * HALF + tl.arange(0, REST_PAD)
        in_rest = (rest < DIM)[None, :]
        third = tl.load(source + rest[None, :], mask=live & in_rest, other=0.0).to(tl.float32)

    if Q_NORM or K_NORM:
        normed = (is_q & Q_NORM) | (is_k & K_NORM)
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if REST_PAD > 0:
            squares += tl.sum(third * third, axis=1)
        scale = tl.where(normed, tl.rsqrt(squares / DIM + eps), 1.0)[:, None]
        weight = tl.where(is_k, k_weight, q_weight)[:, None]
        with_weight = normed[:, None]
        first *= scale * tl.load(weight + half[None, :], mask=with_weight & in_half, other=1.0).to(tl.float32)
        second *= scale * tl.load(weight + HALF + half[None, :], mask=with_weight & in_half, other=1.0).to(tl.float32)
        if REST_PAD > 0:
            third *= scale * tl.load(weight + rest[None, :], mask=with_weight & in_rest, other=1.0).to(tl.float32)

    position = tl.load(positions + token)
    c = tl.load(cos + position * cos_row + half, mask=half < HALF, other=0.0)[None, :]
    s = tl.load(sin + position * sin_row + half, mask=half < HALF, other=0.0)[None, :]
    turned_first = tl.where(rotated[:, None], first * c - second * s, first)
    turned_second = tl.where(rotated[:, None], second * c + first * s, second)

    to_q = is_q[:, None]
    tl.store(source + half[None, :], turned_first.to(qkv.dtype.element_ty), mask=to_q & in_half)
    tl.store(source + HALF + half[None, :], turned_second.to(qkv.dtype.element_ty), mask=to_q & in_half)
    slot = tl.load(slots + token)
    to_pool = (is_k | is_v)[:, None] & (slot >= 0)
    place = slot // BLOCK_SIZE * kv_block + slot % BLOCK_SIZE * kv_token
    kv_index = tl.where(is_v, head - Q_HEADS - KV_HEADS, head - Q_HEADS).to(tl.int64)
    if SCALED:
        # As fp8_linear/reference.py, by heads.
        most = tl.maximum(tl.max(tl.abs(turned_first), axis=1), tl.max(tl.abs(turned_second), axis=1))
        if REST_PAD > 0:
            most = tl.maximum(most, tl.max(tl.abs(third), axis=1))
        most = tl.maximum(most, 1e-12)
        factor = (tl.div_rn(1.0 + tl.zeros_like(most), most) * 448.0)[:, None]
        turned_first, turned_second = turned_first * factor, turned_second * factor
        if REST_PAD > 0:
            scaled_third = third * factor
        scale_place = slot // BLOCK_SIZE * scale_block + slot % BLOCK_SIZE * scale_token
        of_head = scales + scale_place + is_v.to(tl.int64) * scale_part + kv_index * scale_head
        tl.store(of_head, most * (1.0 / 448.0), mask=(is_k | is_v) & (slot >= 0))
    elif REST_PAD > 0:
        scaled_third = third
    target = kv + place + (is_v.to(tl.int64) * kv_part + kv_index * kv_head)[:, None]
    tl.store(target + half[None, :], turned_first.to(kv.dtype.element_ty), mask=to_pool & in_half)
    tl.store(target + HALF + half[None, :], turned_second.to(kv.dtype.element_ty), mask=to_pool & in_half)
    if REST_PAD > 0:
        tl.store(source + rest[None, :], third.to(qkv.dtype.element_ty), mask=to_q & in_rest)
        tl.store(target + rest[None, :], scaled_third.to(kv.dtype.element_ty), mask=to_pool & in_rest)


def rope_kv_write(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    slot_mapping: Tensor,
    *,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    scales: Tensor | None = None,
) -> Tensor:
    """Same contract as `reference.rope_kv_write`."""
    tokens = qkv.shape[0]
    block_size, kv_heads, dim = kv.shape[2], kv.shape[3], kv.shape[4]
    half = cos.shape[1]
    rest = dim - 2 * half
    all_heads = num_heads + 2 * kv_heads
    q = qkv[:, : num_heads * dim].view(tokens, num_heads, dim)
    if tokens == 0:
        return q
    heads = min(_HEADS, power_of_two(all_heads))
    # Never read where a norm is off, but it must be some pointer of the kernel's type.
    absent = q_norm if q_norm is not None else k_norm if k_norm is not None else cos
    _rope_kv_write[(tokens, triton.cdiv(all_heads, heads))](
        qkv,
        positions,
        cos,
        sin,
        kv,
        slot_mapping,
        absent if q_norm is None else q_norm,
        absent if k_norm is None else k_norm,
        eps,
        qkv.stride(0),
        cos.stride(0),
        sin.stride(0),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        kv.stride(3),
        qkv if scales is None else scales,
        *((0, 0, 0, 0) if scales is None else scales.stride()),
        Q_HEADS=num_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF=half,
        HALF_PAD=power_of_two(half),
        REST_PAD=power_of_two(rest) if rest else 0,
        BLOCK_SIZE=block_size,
        HEADS=heads,
        Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None,
        SCALED=scales is not None,
        num_warps=_WARPS,
    )
    return q
