"""Paged attention on CPU through the compiled library (cpu/paged_attention.cpp)."""

import torch
from torch import Tensor

from isthmus_kernels import native
from isthmus_kernels.paged_attention import torch_impl

# What the compiled tiles hold. Wider heads run as PyTorch operations, larger groups in parts.
_MAX_DIM = 576
_MAX_GROUP = 64


def _check_ids(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.int32 or tensor.stride(-1) != 1:
        raise ValueError(f"{name}: expected int32 with a contiguous last dimension, got {tensor.dtype}")


def _explain(code: int, kept: native.Kept) -> Exception:
    if code == 1:
        return native.out_of_memory(code, kept)
    kv = kept[2]
    assert kv is not None
    return IndexError(f"block_tables[{code - 2}]: an id within the context is outside the pool's {kv.shape[0]} blocks")


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
) -> Tensor:
    """Same contract as `reference.paged_attention`."""
    tokens, heads, dim = q.shape
    blocks, _, block_size, kv_heads, _ = kv.shape
    group = heads // kv_heads
    if dim > _MAX_DIM:
        return torch_impl.paged_attention(
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
    _check_ids("block_tables", block_tables)
    _check_ids("query_start_loc", query_start_loc)
    _check_ids("seq_lens", seq_lens)
    if out is None:
        out = torch.empty((tokens, heads, dim), dtype=q.dtype)
    elif out.shape != q.shape or out.dtype != q.dtype or out.stride(2) != 1:
        raise ValueError(f"out: expected {q.dtype} {tuple(q.shape)}, got {out.dtype} {tuple(out.shape)}")
    if group > _MAX_GROUP:
        for first in range(0, heads, group):
            own = slice(first // group, first // group + 1)
            for begin in range(first, first + group, _MAX_GROUP):
                part = slice(begin, min(begin + _MAX_GROUP, first + group))
                paged_attention(
                    q[:, part],
                    kv[:, :, :, own],
                    block_tables,
                    query_start_loc,
                    seq_lens,
                    scale=scale,
                    max_query_len=max_query_len,
                    max_seq_len=max_seq_len,
                    window=window,
                    softcap=softcap,
                    sinks=None if sinks is None else sinks[part],
                    scales=None if scales is None else scales[:, :, :, own],
                    out=out[:, part],
                )
        return out
    native.entry("paged_attention", "28q2d2q", _explain)(
        (out, q, kv, block_tables, query_start_loc, seq_lens, sinks, scales),
        out.data_ptr(),
        q.data_ptr(),
        kv.data_ptr(),
        block_tables.data_ptr(),
        query_start_loc.data_ptr(),
        seq_lens.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        block_tables.shape[0],
        heads,
        kv_heads,
        dim,
        block_size,
        blocks,
        block_tables.stride(0),
        0 if window is None else window,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        kv.stride(3),
        *native.scale_slots(scales),
        scale,
        0.0 if softcap is None else softcap,
        native.dtype_code(q.dtype, "q"),
        native.pool_code(kv.dtype),
    )
    return out
