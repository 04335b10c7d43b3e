"""Views of one layer of a paged KV pool.

Every op takes one layer as a strided view ``[num_blocks, 2, block_size, kv_heads, head_dim]``
(index 1: 0 = keys, 1 = values), so that it needs to know nothing of the pool layout.
"""

from typing import Literal

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


def check_layer(kv: Tensor) -> None:
    """Raise ValueError unless `kv` is a layer view whose head_dim is contiguous."""
    if kv.dim() != 5 or kv.shape[1] != 2:
        raise ValueError(
            "kv: expected [num_blocks, 2, block_size, kv_heads, head_dim], got "
            f"{tuple(kv.shape)} (use kv_view.layer_view)"
        )
    if kv.stride(4) != 1:
        raise ValueError(f"kv: the last dimension must have stride 1, got {kv.stride(4)}")
