"""Block copy: exactness over the whole pool, overlap, and the errors that must leave it untouched."""

import pytest
import torch

from isthmus_kernels import dispatch


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("block_dim", [0, 2])
@pytest.mark.parametrize(
    ("src", "dst"), [([], []), ([1], [0]), ([1, 1, 4], [2, 3, 5]), ([0, 1, 2], [1, 2, 3]), ([3, 4], [4, 3])]
)
def test_whole_pool(impl: str, block_dim: int, src: list[int], dst: list[int]) -> None:
    shape = [2, 2, 4, 3, 8]
    shape.insert(block_dim, 7)
    pool = torch.randn(shape).bfloat16()
    want = pool.clone()
    for a, b in zip(src, dst, strict=True):
        want.select(block_dim, b).copy_(pool.select(block_dim, a))
    dispatch.block_copy(pool, src, dst, block_dim=block_dim, impl=impl)
    assert torch.equal(pool, want)


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([-1], [2], r"src\[0\] = -1 is negative"),
        ([1, 7], [2, 3], r"src\[1\] = 7 is >= num_blocks 7"),
        ([1, 1], [2, 9], r"dst\[1\] = 9 is >= num_blocks 7"),
        ([1, 2], [3, 3], r"dst\[1\] = 3 repeats dst\[0\]"),
        ([1, 2], [3], r"src has 2 ids but dst has 1"),
        ([-1, 8], [3, 3], r"src\[0\].*src\[1\].*dst\[1\]"),
    ],
)
def test_bad_ids_are_named_and_nothing_is_copied(src: list[int], dst: list[int], message: str) -> None:
    pool = torch.randn(7, 1, 2, 4, 1, 8)
    before = pool.clone()
    with pytest.raises(ValueError, match=message):
        dispatch.block_copy(pool, src, dst)
    assert torch.equal(pool, before)
