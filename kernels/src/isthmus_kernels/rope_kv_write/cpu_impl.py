"""Rotary embedding and KV write on CPU through the compiled library (cpu/rope_kv_write.cpp)."""

import torch
from torch import Tensor

from isthmus_kernels import native


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}"
        )


def _explain(code: int, kept: native.Kept) -> Exception:
    _, positions, cos, _, kv, slot_mapping, *_ = kept
    assert positions is not None and cos is not None and kv is not None and slot_mapping is not None
    token, bad_slot = divmod(code - 1, 2)
    if bad_slot:
        slots = kv.shape[0] * kv.shape[2]
        return IndexError(f"slot_mapping[{token}] = {int(slot_mapping[token])} is outside the pool's {slots} slots")
    return IndexError(f"positions[{token}] = {int(positions[token])} is outside the table's {cos.shape[0]}")


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
    blocks, _, block_size, kv_heads, dim = kv.shape
    _check("positions", positions, torch.int64, (tokens,))
    _check("slot_mapping", slot_mapping, torch.int64, (tokens,))
    half = cos.shape[1]
    _check("cos", cos, torch.float32, (cos.shape[0], half))
    _check("sin", sin, torch.float32, (cos.shape[0], half))
    if 2 * half > dim or dim > 1024:
        raise ValueError(f"cos: {2 * half} rotated channels do not fit head_dim {dim} (at most 1024)")
    norm_dtype = torch.float32
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            norm_dtype = norm.dtype
            _check(name, norm, norm_dtype, (dim,))
    if q_norm is not None and k_norm is not None and q_norm.dtype != k_norm.dtype:
        raise ValueError(f"k_norm: dtype {k_norm.dtype} differs from q_norm's {q_norm.dtype}")
    native.entry("rope_kv_write", "25qd3q", _explain)(
        (qkv, positions, cos, sin, kv, slot_mapping, q_norm, k_norm, scales),
        qkv.data_ptr(),
        positions.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        kv.data_ptr(),
        slot_mapping.data_ptr(),
        0 if q_norm is None else q_norm.data_ptr(),
        0 if k_norm is None else k_norm.data_ptr(),
        tokens,
        num_heads,
        cos.shape[0],
        half,
        blocks,
        block_size,
        kv_heads,
        dim,
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        kv.stride(3),
        *native.scale_slots(scales),
        eps,
        native.dtype_code(qkv.dtype, "qkv"),
        native.pool_code(kv.dtype),
        native.dtype_code(norm_dtype, "q_norm"),
    )
    return qkv[:, : num_heads * dim].view(tokens, num_heads, dim)
