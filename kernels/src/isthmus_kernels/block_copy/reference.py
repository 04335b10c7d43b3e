"""Definition of the block copy, with its validation of ids."""

from collections.abc import Sequence

from torch import Tensor

from isthmus_kernels.ids import check_pairs


def check_ids(src: Sequence[int], dst: Sequence[int], num_blocks: int) -> None:
    """Raise one ValueError that names every bad index of the two id lists (see `ids.check_pairs`)."""
    check_pairs("block_copy", ("src", "dst"), src, dst, num_blocks, num_blocks)


def block_copy(pool: Tensor, src: Sequence[int], dst: Sequence[int], *, block_dim: int = 0) -> None:
    """Copy block ``src[i]`` of `pool` over block ``dst[i]``, for all i at once.

    `block_dim` is the dimension of `pool` that counts blocks (0 block-major, 2 layer-major).
    All sources are read before any destination is written, so an id may be in both lists.
    Raises ValueError (see `check_ids`) before anything is copied.
    """
    check_ids(src, dst, pool.shape[block_dim])
    copies = [pool.select(block_dim, block).clone() for block in src]
    for block, copy in zip(dst, copies, strict=True):
        pool.select(block_dim, block).copy_(copy)
