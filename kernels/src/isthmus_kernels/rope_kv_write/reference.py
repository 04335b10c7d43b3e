"""Definition of the fused rotary embedding and KV write."""

import torch
from torch import Tensor

from isthmus_kernels.fp8_linear.reference import quantize


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


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
    """Rotate q in place, write rotated k and plain v to the pool, return q; see the README."""
    tokens = qkv.shape[0]
    block_size, kv_heads, dim = kv.shape[2], kv.shape[3], kv.shape[4]
    heads = qkv.view(tokens, num_heads + 2 * kv_heads, dim)
    q = heads[:, :num_heads]
    k = heads[:, num_heads : num_heads + kv_heads]
    v = heads[:, num_heads + kv_heads :]
    cos_t, sin_t = cos[positions], sin[positions]
    q.copy_(_rotate(_norm(q.float(), q_norm, eps), cos_t, sin_t))
    rotated = _rotate(_norm(k.float(), k_norm, eps), cos_t, sin_t)
    keep = slot_mapping >= 0
    slots = slot_mapping[keep]
    for part, rows in enumerate((rotated[keep], v[keep])):
        where = (slots // block_size, part, slots % block_size)
        if scales is None:
            kv[where] = rows.to(kv.dtype)
        else:
            kv[where], scales[where] = quantize(rows)
    return q
