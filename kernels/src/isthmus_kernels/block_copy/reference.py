"""Definition of the block copy, with its validation of ids."""

from collections.abc import Sequence

from torch import Tensor


def check_ids(src: Sequence[int], dst: Sequence[int], num_blocks: int) -> None:
    """Raise one ValueError that names every bad index of the two id lists.

    Bad are: lists of unequal length, an id that is negative or >= num_blocks, and a
    destination that occurs twice. The same source may be read any number of times.
    """
    problems = []
    if len(src) != len(dst):
        problems.append(f"src has {len(src)} ids but dst has {len(dst)}")
    for name, ids in (("src", src), ("dst", dst)):
        for index, block in enumerate(ids):
            if block < 0:
                problems.append(f"{name}[{index}] = {block} is negative")
            elif block >= num_blocks:
                problems.append(f"{name}[{index}] = {block} is >= num_blocks {num_blocks}")
    seen: dict[int, int] = {}
    for index, block in enumerate(dst):
        if block in seen:
            problems.append(f"dst[{index}] = {block} repeats dst[{seen[block]}]")
        seen.setdefault(block, index)
    if problems:
        raise ValueError("block_copy: nothing was copied: " + "; ".join(problems))


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
