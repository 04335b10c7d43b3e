"""Views of one layer of a paged KV pool.

Every op takes one layer as a strided view ``[num_blocks, 2, block_size, kv_heads, head_dim]``
(index 1: 0 = keys, 1 = values), so that it needs to know nothing of the pool layout.
"""

from typing import Literal

import torch
from torch import Tensor

Layout = Literal["block-major", "layer-major"]


def layer_view(pool: Tensor, slot: int, layout: Layout = "block-major") -> Tensor:
    """Return layer `slot` of `pool` as ``[num_blocks, 2, block_size, kv_heads, head_dim]``.

    `pool` is ``[num_blocks, slots, 2, block_size, kv_heads, head_dim]`` when block-major and
    ``[slots, 2, num_blocks, block_size, kv_heads, head_dim]`` when layer-major. No bytes move.
    Raises ValueError for a pool that is not 6-dimensional or a slot outside it.
    """
    if pool.dim() != 6:
        raise ValueError(f"pool: expected 6 dimensions, got shape {tuple(pool.shape)}")
    slots = pool.shape[1 if layout == "block-major" else 0]
    if not 0 <= slot < slots:
        raise ValueError(f"slot: {slot} is outside 0..{slots - 1}")
    if layout == "block-major":
        return pool[:, slot]
    return pool[slot].transpose(0, 1)


def block_view(pool: Tensor, layout: Layout = "block-major") -> Tensor:
    """Return `pool` as ``[num_blocks, slots, 2, block_size, kv_heads, head_dim]``, whatever its layout.

    No bytes move. A slice of it is a range of layers (dimension 1), of heads (dimension 4) or of either for
    keys or values alone. Raises ValueError for a pool that is not 6-dimensional.
    """
    if pool.dim() != 6:
        raise ValueError(f"pool: expected 6 dimensions, got shape {tuple(pool.shape)}")
    return pool if layout == "block-major" else pool.permute(2, 0, 1, 3, 4, 5)


def check_layer(kv: Tensor, scales: Tensor | None) -> None:
    """Raise ValueError unless `kv` is a layer view whose head_dim is contiguous, with fp32 `scales`
    ``[num_blocks, 2, block_size, kv_heads]`` if it is of 8-bit floats (E4M3): what a number is multiplied with."""
    if kv.dim() != 5 or kv.shape[1] != 2:
        raise ValueError(
            "kv: expected [num_blocks, 2, block_size, kv_heads, head_dim], got "
            f"{tuple(kv.shape)} (use kv_view.layer_view)"
        )
    if kv.stride(4) != 1:
        raise ValueError(f"kv: the last dimension must have stride 1, got {kv.stride(4)}")
    if (kv.dtype == torch.float8_e4m3fn) != (scales is not None):
        raise ValueError(f"scales: a pool of {kv.dtype} {'has none' if scales is not None else 'needs them'}")
    if scales is not None and (scales.shape != kv.shape[:4] or scales.dtype != torch.float32):
        raise ValueError(f"scales: expected fp32 {list(kv.shape[:4])}, got {scales.dtype} {list(scales.shape)}")
