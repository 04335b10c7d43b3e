"""The ops of the engine. Each call goes to the best implementation for the device of its tensors.

Those on logits are in `dispatch_logits`, what prepares weights in `dispatch_weights`.

`impl` overrides the choice by name: "cpu" (compiled C++), "cuda" (compiled CUDA), "triton", "torch" or "reference", or
a peer that is installed ("flashinfer"); `selection` has the choice. Our ops never synchronise with the
device, never loop over requests in Python and write to the given buffers, so that a captured graph can replay them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isthmus_kernels.kv_swap.swap import KvSwap
from isthmus_kernels.kv_view import check_layer
from isthmus_kernels.linear.packed import GatedWeight, PackedLinear, PartedWeight, SummingWeight
from isthmus_kernels.lora.shapes import check_adapters
from isthmus_kernels.moe.mxfp4 import blocks_of
from isthmus_kernels.selection import select


def paged_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scales: Tensor | None = None,
    out: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Causal grouped-query attention of R requests, prefill chunks and decode rows in one call.

    Args:
        q: ``[T, Hq, D]``, fp32 or bf16; D contiguous, token stride free (a slice of a fused qkv is fine).
        kv: one layer, ``[num_blocks, 2, block_size, Hkv, D]`` (`layer_view`); holds this chunk's keys already.
        block_tables: int32 ``[R, max_blocks]``; entries past a request's context are never read.
        query_start_loc: int32 ``[R + 1]``; rows of `out` at or past its last value are not written.
        seq_lens: int32 ``[R]``: context length including this chunk. Query i of a chunk of n is at position
            ``seq_len - n + i``.
        scale: factor on q·k, usually ``D ** -0.5``.
        max_query_len, max_seq_len: host-known upper bounds over the batch (they size grids).
        window: a query sees the last `window` positions, itself included; None means all.
        softcap: scores s become ``softcap · tanh(s / softcap)`` (Gemma 2); None means none.
        sinks: fp32 ``[Hq]``: one more score for each head, uncapped, that takes its share of the softmax and has no
            value (GPT-OSS); None means none.
        scales: fp32 ``[num_blocks, 2, block_size, Hkv]``, any strides, of a pool of 8-bit floats (E4M3): keys and
            values are its numbers times these. None for other pools.
        out: ``[T, Hq, D]``; allocated when None. Accumulation is fp32 whatever the dtypes.
    """
    check_layer(kv, scales)
    if q.shape[1] % kv.shape[3]:
        raise ValueError(f"q: {q.shape[1]} heads are not a multiple of {kv.shape[3]} kv heads")
    if q.shape[2] != kv.shape[4]:
        raise ValueError(f"q: head_dim {q.shape[2]} differs from the pool's {kv.shape[4]}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap: {softcap} is not above 0")
    if sinks is not None and (sinks.shape != q.shape[1:2] or sinks.dtype != torch.float32 or sinks.stride(0) != 1):
        raise ValueError(f"sinks: expected contiguous fp32 [{q.shape[1]}], got {sinks.dtype} {tuple(sinks.shape)}")
    run = select("paged_attention", q.device.type, impl)
    result: Tensor = run(
        q,
        kv,
        block_tables,
        query_start_loc,
        seq_lens,
        scale=scale,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        window=window,
        softcap=softcap,
        sinks=sinks,
        scales=scales,
        out=out,
    )
    return result


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
    impl: str | None = None,
) -> Tensor:
    """Rotate q in place, and write rotated k and plain v to the paged pool.

    Args:
        qkv: fused projection ``[T, (num_heads + 2 Hkv) * D]``, fp32 or bf16, contiguous. Only q changes.
            With ``num_heads`` 0 it is keys and values alone.
        positions: int64 ``[T]``, indices into the tables.
        cos, sin: fp32 ``[max_pos, rot / 2]``; neox (half-split) style on the first ``rot <= D`` channels.
        kv: one layer of the pool (`layer_view`), fp32, bf16 or 8-bit floats (E4M3).
        slot_mapping: int64 ``[T]``: ``block_id * block_size + offset``; negative: this token is not written.
        q_norm, k_norm: weights ``[D]`` of a per-head RMSNorm before the rotation (Qwen3), or None.
        scales: fp32 ``[num_blocks, 2, block_size, Hkv]``, any strides, of a pool of 8-bit floats: each head of each
            token gets the one by which its largest magnitude is 448, the largest number. None for other pools.

    Returns:
        q as a view ``[T, num_heads, D]`` of `qkv`, ready for `paged_attention`.
    """
    check_layer(kv, scales)
    width = (num_heads + 2 * kv.shape[3]) * kv.shape[4]
    if qkv.dim() != 2 or qkv.shape[1] != width or not qkv.is_contiguous():
        raise ValueError(f"qkv: expected a contiguous [T, {width}], got {tuple(qkv.shape)}")
    run = select("rope_kv_write", qkv.device.type, impl)
    result: Tensor = run(
        qkv,
        positions,
        cos,
        sin,
        kv,
        slot_mapping,
        num_heads=num_heads,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        scales=scales,
    )
    return result


def latent_kv_write(
    q: Tensor,
    row: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    slot_mapping: Tensor,
    *,
    impl: str | None = None,
) -> None:
    """Rotate `q` and the end of `row` in place, and write `row` to the paged pool: latent attention's KV.

    Args:
        q: ``[T, Hq, R]``: the part of the queries that turns; any strides.
        row: ``[T, W]``, its last R channels the part of the keys that turns.
        positions: int64 ``[T]``, indices into the tables.
        cos, sin: fp32 ``[max_pos, R / 2]``; half-split style.
        kv: one layer of the pool, ``[num_blocks, 1, block_size, 1, W]``.
        slot_mapping: int64 ``[T]``: ``block_id * block_size + offset``; negative: this token is not written.
    """
    if kv.dim() != 5 or kv.shape[1] != 1 or kv.shape[3:] != (1, row.shape[1]) or q.shape[2] != 2 * cos.shape[1]:
        raise ValueError(
            f"kv: expected [num_blocks, 1, block_size, 1, {row.shape[1]}] and q [T, Hq, {2 * cos.shape[1]}], got "
            f"{tuple(kv.shape)} and {tuple(q.shape)}"
        )
    select("latent_kv_write", row.device.type, impl)(q, row, positions, cos, sin, kv, slot_mapping)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None, impl: str | None = None) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` of `x` ``[T, H]``, computed in fp32."""
    result: Tensor = select("rms_norm", x.device.type, impl)(x, weight, eps, out=out)
    return result


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Set ``residual += x`` in place and return its RMSNorm; `out` may be `x`."""
    result: Tensor = select("add_rms_norm", x.device.type, impl)(x, residual, weight, eps, out=out)
    return result


def silu_mul(x: Tensor, *, out: Tensor | None = None, impl: str | None = None) -> Tensor:
    """Return ``silu(x[:, :I]) * x[:, I:]`` of `x` ``[T, 2 I]``, computed in fp32."""
    result: Tensor = select("silu_mul", x.device.type, impl)(x, out=out)
    return result


def gelu_tanh_mul(x: Tensor, *, out: Tensor | None = None, impl: str | None = None) -> Tensor:
    """Return ``gelu(x[:, :I]) * x[:, I:]`` of `x` ``[T, 2 I]``, GELU in its tanh form, computed in fp32."""
    result: Tensor = select("gelu_tanh_mul", x.device.type, impl)(x, out=out)
    return result


def embedding(table: Tensor, ids: Tensor, *, scale: float = 1.0, out: Tensor, impl: str | None = None) -> Tensor:
    """Write rows ``table[ids] * scale`` of `table` ``[V, H]`` to `out` ``[T, H]``; `ids` int32 ``[T]``.

    The dtypes of table and output may differ. An id outside the table is an IndexError on CPU, a row of NaN on a GPU.
    """
    result: Tensor = select("embedding", table.device.type, impl)(table, ids, scale=scale, out=out)
    return result


def block_copy(
    pool: Tensor, src: Sequence[int], dst: Sequence[int], *, block_dim: int = 0, impl: str | None = None
) -> None:
    """Copy block ``src[i]`` of `pool` over block ``dst[i]``, for all i, sources read first.

    `block_dim` is the dimension of `pool` that counts blocks: 0 block-major, 2 layer-major. Raises one
    ValueError naming each bad index (negative, >= num_blocks, duplicate destination); then nothing is copied.
    """
    select("block_copy", pool.device.type, impl)(pool, src, dst, block_dim=block_dim)


def kv_swap(pool: Tensor, host: Tensor, *, impl: str | None = None, **options: Any) -> KvSwap:
    """Bind a pool to a host buffer, once, for swaps of blocks between them.

    Args:
        pool: ``[num_blocks, ...]``, any strides: `block_view` of a pool of either layout, or a slice of it (a range
            of layers or heads).
        host: ``[host_blocks, ...]`` of the same dtype and block shape, any strides, pinned when the pool is on a GPU.
        options: those of the implementation (`kv_swap.cuda_impl.kv_swap`).

    Raises ValueError with all that is wrong with the two views.
    """
    result: KvSwap = select("kv_swap", pool.device.type, impl)(pool, host, **options)
    return result


def linear(x: Tensor, packed: PackedLinear, *, out: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``, in x's dtype, for `x` ``[T, K]``; accumulation is fp32."""
    return packed.weight.apply(x, out)


def linear_parts(x: Tensor, packed: PackedLinear) -> Tensor | None:
    """fp32 ``[P, T, N]``, whose sum over P is ``linear(x, packed)``, in memory that the next such product overwrites.
    None where that is not faster for whoever adds up several anyway."""
    return packed.weight.apply_parts(x) if isinstance(packed.weight, PartedWeight) else None


def lora(
    x: Tensor,
    out: Tensor,
    slots: Tensor,
    a: Tensor,
    b: Tensor,
    starts: tuple[int, ...],
    *,
    impl: str | None = None,
) -> None:
    """Add each row's low-rank adapter to what a linear layer made of x: ``out += (x A^T) B``. Arguments and sources:
    `lora.shapes.check_adapters`."""
    check_adapters(x, out, slots, a, b, starts)
    select("lora", x.device.type, impl)(x, out, slots, a, b, starts)


def linear_silu_mul(x: Tensor, packed: PackedLinear, *, scratch: Tensor | None = None, out: Tensor) -> Tensor:
    """Write ``silu(g) * u`` of ``[g, u] = linear(x, packed)`` to `out` ``[T, I]``; `packed` has 2 I outputs.

    In one product where there is a kernel for it, which does not round g and u in between. Otherwise as the two ops;
    `scratch` ``[T, 2 I]`` is for what is between them, allocated when None.
    """
    if packed.out_features != 2 * out.shape[1]:
        raise ValueError(f"out: expected [T, {packed.out_features} / 2], got {tuple(out.shape)}")
    if isinstance(packed.weight, GatedWeight) and packed.weight.apply_silu_mul(x, out):
        return out
    return silu_mul(linear(x, packed, out=scratch), out=out)


def linear_add_rms_norm(
    x: Tensor,
    packed: PackedLinear,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    scratch: Tensor | None = None,
    out: Tensor,
) -> Tensor:
    """Set ``residual += linear(x, packed)`` in place and write its RMSNorm with `weight` to `out`, which may be x.

    In one product that adds where there is one, which does not round what it adds. Otherwise as the two ops; `scratch`
    ``[T, N]``, not x, is for what is between them, allocated when None.
    """
    if residual.shape != (x.shape[0], packed.out_features) or out.shape != residual.shape:
        raise ValueError(
            f"residual, out: expected [{x.shape[0]}, {packed.out_features}], got {tuple(residual.shape)} and "
            f"{tuple(out.shape)}"
        )
    if isinstance(packed.weight, SummingWeight) and packed.weight.apply_add_rms_norm(x, residual, weight, eps, out):
        return out
    return add_rms_norm(linear(x, packed, out=scratch), residual, weight, eps, out=out)


def moe_route(
    logits: Tensor,
    top_k: int,
    *,
    renormalize: bool = True,
    sigmoid: bool = False,
    bias: Tensor | None = None,
    groups: tuple[int, int] | None = None,
    scale: float = 1.0,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose experts by `logits` ``[T, E]``: weights fp32 ``[T, k]`` and ids int32 ``[T, k]``, best first.

    Weights are the softmax of the logits; `renormalize` makes each row's k sum to 1. Of equal experts the first is the
    better one. The other arguments are DeepSeek's, and run as PyTorch operations on GPUs:

    Args:
        sigmoid: weights are the logits' sigmoids.
        bias: fp32 ``[E]``, added for the choice, not to the weights.
        groups: (G, g): experts come in G groups of neighbours, and are chosen out of the g best groups. A group is
            worth its best expert, with a bias its two best together.
        scale: on the weights, in the end.
    """
    if not 0 < top_k <= logits.shape[1]:
        raise ValueError(f"top_k: {top_k} is outside 1..{logits.shape[1]}, the number of experts")
    options: dict[str, Any] = {"renormalize": renormalize}
    if sigmoid or bias is not None or groups is not None or scale != 1.0:
        options |= {"sigmoid": sigmoid, "bias": bias, "groups": groups, "scale": scale}
        impl = "reference" if impl is None and logits.device.type != "cpu" else impl
    result: tuple[Tensor, Tensor] = select("moe_route", logits.device.type, impl)(logits, top_k, **options)
    return result


def moe(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    clamp: tuple[float, float] | None = None,
    out: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Return ``Σ_j weights[t, j] · down_e (silu(gate_e x_t) · up_e x_t)`` with ``e = experts[t, j]``.

    Args:
        x: ``[T, H]``, contiguous.
        weights, experts: of `moe_route`, contiguous.
        gate_up: ``[E, 2 I, H]``, gate rows first; `down`: ``[E, H, I]``; both in x's dtype (but see the scales)
            with contiguous rows.
        gate_up_bias, down_bias: ``[E, 2 I]`` and ``[E, H]``, contiguous, both or neither.
        gate_up_scale, down_scale: fp32 ``[E, 2 I]`` and ``[E, H]``, both or neither: gate_up and down are E4M3 with
            these scales of their rows, and the rows they are multiplied with are rounded to E4M3 (`quantize`). Or,
            contiguous as `dispatch_weights.pack_mxfp4` makes them: gate_up and down are of 4-bit floats with these
            scales of their blocks, and are multiplied with bf16 as it is.
        clamp: (α, c): instead of ``silu(g) · u``, with ``g' = min(g, c)`` and u' = u within ±c:
            ``g' · σ(α g') · (u' + 1)`` (GPT-OSS).
    """
    hidden, inner = x.shape[1], gate_up.shape[1] // 2
    four = gate_up.dtype == torch.uint8
    rows = [64 * blocks_of(columns) if four else columns for columns in (hidden, inner)]
    count = gate_up.shape[0]
    if gate_up.shape != (count, 2 * inner, rows[0]) or down.shape != (count, hidden, rows[1]):
        raise ValueError(
            f"gate_up, down: {tuple(gate_up.shape)} and {tuple(down.shape)} are not [E, 2 I, {rows[0]}] and "
            f"[E, {hidden}, {'64 ⌈I / 128⌉' if four else 'I'}]"
        )
    if (gate_up_bias is None) != (down_bias is None):
        raise ValueError("gate_up_bias, down_bias: expected both or neither")
    if (gate_up_scale is None) != (down_scale is None):
        raise ValueError("gate_up_scale, down_scale: expected both or neither")
    if gate_up_scale is not None and down_scale is not None:
        _check_scales(x, (gate_up, down), (gate_up_scale, down_scale))
    elif four:
        raise ValueError("gate_up_scale, down_scale: 4-bit floats have scales")
    scales: dict[str, Tensor] = {}
    if gate_up_scale is not None and down_scale is not None:
        scales = {"gate_up_scale": gate_up_scale, "down_scale": down_scale}
        # Nothing is compiled for 8-bit and 4-bit floats on CPUs, where they are not served.
        impl = impl or ("reference" if x.device.type == "cpu" else None)
    result: Tensor = select("moe", x.device.type, impl)(
        x,
        weights,
        experts,
        gate_up,
        down,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        clamp=clamp,
        out=out,
        **scales,
    )
    return result


def _check_scales(x: Tensor, matrices: tuple[Tensor, Tensor], scales: tuple[Tensor, Tensor]) -> None:
    """Raise ValueError for scales that are not of these weights."""
    kinds = tuple(matrix.dtype for matrix in matrices)
    if kinds == (torch.uint8,) * 2:
        for name, matrix, scale in zip(("gate_up", "down"), matrices, scales, strict=True):
            want = (*matrix.shape[:2], matrix.shape[2] // 64)
            if scale.shape != want or scale.dtype != torch.int32 or not scale.is_contiguous():
                raise ValueError(
                    f"{name}_scale: expected contiguous int32 {list(want)}, got {scale.dtype} {list(scale.shape)}"
                )
        if x.dtype != torch.bfloat16:
            raise ValueError(f"x: 4-bit floats are multiplied with bfloat16, got {x.dtype}")
    elif kinds != (torch.float8_e4m3fn,) * 2:
        raise ValueError(
            f"gate_up, down: scales are of float8_e4m3fn, or of uint8 with 4-bit floats, got {kinds[0]} and {kinds[1]}"
        )
