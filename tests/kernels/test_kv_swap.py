"""kv_swap: exactness over both whole buffers, odd sizes, far offsets, ids, and the cut into items."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_kernels import cuda_library, dispatch, kv_view, native
from isthmus_kernels.kv_swap.cases import SWAP_CASES, SwapCase
from isthmus_kernels.kv_swap.geometry import DIRECTIONS, Direction, Stage, geometry, route, stage

IMPLS = ["reference", *(["cpu"] if native.available() else [])]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("case", SWAP_CASES, ids=str)
def test_both_whole_buffers(impl: str, direction: Direction, case: SwapCase) -> None:
    buffers = case.build(direction)
    swap = dispatch.kv_swap(buffers.pool, buffers.host, impl=impl)
    run = swap.swap_in if direction == "in" else swap.swap_out
    run(buffers.pool_ids, buffers.host_ids).synchronize()
    buffers.check()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, list])
@pytest.mark.parametrize(
    ("pool_ids", "host_ids"),
    [([], []), ([2], [0]), ([0, 1, 2], [4, 4, 4]), ([5, 4, 3, 0], [3, 2, 1, 4]), ([1, 2, 3], [3, 2, 1])],
)
def test_ids_of_either_type_in_any_order(impl: str, dtype: object, pool_ids: list[int], host_ids: list[int]) -> None:
    pool, host = torch.randn(6, 3, 5), torch.randn(5, 3, 5)
    want = pool.clone()
    for on_pool, on_host in zip(pool_ids, host_ids, strict=True):
        want[on_pool] = host[on_host]
    ids = (
        (pool_ids, host_ids)
        if dtype is list
        else (torch.tensor(pool_ids, dtype=dtype), torch.tensor(host_ids, dtype=dtype))  # type: ignore[call-overload]
    )
    dispatch.kv_swap(pool, host, impl=impl).swap_in(*ids)
    assert torch.equal(pool, want)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("pool_ids", "host_ids", "message"),
    [
        ([-1], [2], r"pool_ids\[0\] = -1 is negative"),
        ([1, 6], [2, 3], r"pool_ids\[1\] = 6 is >= num_blocks 6"),
        ([1, 1], [2, 5], r"host_ids\[1\] = 5 is >= num_blocks 5.*pool_ids\[1\] = 1 repeats pool_ids\[0\]"),
        ([1, 2], [3], r"host_ids has 1 ids but pool_ids has 2"),
        (list(range(100, 130)), [0] * 30, r"pool_ids\[19\] .*; and 10 more"),
    ],
)
def test_bad_ids_are_named_and_nothing_is_copied(
    impl: str, pool_ids: list[int], host_ids: list[int], message: str
) -> None:
    pool, host = torch.randn(6, 3, 5), torch.randn(5, 3, 5)
    before = pool.clone()
    with pytest.raises(ValueError, match=message):
        dispatch.kv_swap(pool, host, impl=impl).swap_in(pool_ids, host_ids)
    assert torch.equal(pool, before)


def test_a_destination_is_on_the_other_side_when_swapping_out() -> None:
    pool, host = torch.randn(6, 4), torch.randn(5, 4)
    swap = dispatch.kv_swap(pool, host)
    swap.swap_out([3, 3], [0, 1])
    assert torch.equal(host[:2], pool[3].expand(2, 4))
    with pytest.raises(ValueError, match=r"host_ids\[1\] = 2 repeats host_ids\[0\]"):
        swap.swap_out([1, 2], [2, 2])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.ones(2), r"pool_ids: expected int32 or int64 \[n\], got torch.float32 \(2,\)"),
        (torch.ones(2, 1, dtype=torch.int32), r"got torch.int32 \(2, 1\)"),
        (torch.ones(2, dtype=torch.int64, device="meta"), "checked on the host, got a tensor on meta"),
    ],
)
def test_ids_of_another_kind_are_refused(ids: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dispatch.kv_swap(torch.zeros(4, 8), torch.zeros(4, 8)).swap_in(ids, [0, 1])


@pytest.mark.parametrize(
    ("pool", "host", "message"),
    [
        (torch.zeros(4, 8), torch.zeros(4, 8).half(), r"host: dtype torch.float16 differs from the pool's"),
        (torch.zeros(4, 8, 2), torch.zeros(4, 8, 1), r"host: expected \[blocks, ...\] with the block shape"),
        (torch.zeros(4, 1).expand(4, 8), torch.zeros(4, 8), "pool: an expanded view"),
        (torch.zeros(4, 8), torch.zeros(4, 1).half().expand(4, 9), r"dtype.*block shape.*host: an expanded view"),
        (torch.zeros(4), torch.zeros(4), "block shape"),
        (torch.zeros(4, 0, 8), torch.zeros(4, 0, 8), r"pool: a block of shape \(0, 8\) has no elements"),
        (
            torch.zeros(2, *[4] * 6)[:, ::2, ::2, ::2, ::2, ::2, ::2],
            torch.zeros(2, *[2] * 6),
            "has 6 separate dimensions; at most 4",
        ),
    ],
)
def test_views_that_do_not_fit_are_refused(pool: torch.Tensor, host: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dispatch.kv_swap(pool, host)


@pytest.mark.parametrize("impl", IMPLS)
def test_prepared_swap_copies_what_was_filled(impl: str) -> None:
    pool, host = torch.randn(6, 4), torch.randn(6, 4)
    swap = dispatch.kv_swap(pool, host, impl=impl)
    prepared = swap.prepare("out", 3)
    before = host.clone()
    prepared.launch()
    assert torch.equal(host, before)
    prepared.fill([1, 2], [4, 5])
    prepared.launch()
    assert torch.equal(host[4:], pool[1:3])
    with pytest.raises(ValueError, match="4 ids are more than the 3 that were prepared"):
        prepared.fill([0] * 4, [0, 1, 2, 3])
    with pytest.raises(ValueError, match=r"pool_ids\[0\] = 9"):
        prepared.fill([9], [0])
    prepared.close()
    swap.close()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("limit", [2**31, 2**32], ids=["int32", "uint32"])
def test_far_blocks(impl: str, limit: int) -> None:
    """A pool whose first block past `limit` elements is at an id that wraps to a positive offset."""
    stride = limit // 3 + 64
    # The system commits only the pages that are written, so the 9 GB are address space.
    pool = torch.empty(3 * stride + 128, dtype=torch.bfloat16).as_strided((4, 128), (stride, 1))
    host = torch.randn(4, 128).bfloat16()
    swap = dispatch.kv_swap(pool, host, impl=impl)
    swap.swap_in([3, 2], [0, 1])
    assert torch.equal(pool[3], host[0]) and torch.equal(pool[2], host[1])
    assert pool[:2].count_nonzero() == 0
    swap.swap_out([3], [2])
    assert torch.equal(host[2], host[0])


@pytest.mark.parametrize("impl", IMPLS)
@given(data=st.data())
@settings(max_examples=150)
def test_runs_of_ids(impl: str, data: st.DataObject) -> None:
    """Whole blocks side by side: runs that rise, fall, turn, or rise on one side only."""
    pool_ids: list[int] = []
    host_ids: list[int] = []
    for _ in range(data.draw(st.integers(1, 6))):
        length = data.draw(st.integers(1, 5))
        for ids in (pool_ids, host_ids):
            start, step = data.draw(st.integers(4, 45)), data.draw(st.sampled_from([1, -1]))
            ids.extend(start + step * i for i in range(length))
    kept = {to: index for index, to in enumerate(pool_ids)}.values()
    pool_ids, host_ids = [pool_ids[i] for i in kept], [host_ids[i] for i in kept]
    pool, host = torch.arange(50)[:, None].expand(-1, 3).contiguous(), torch.arange(100, 150)[:, None].expand(-1, 3)
    want = pool.clone()
    for on_pool, on_host in zip(pool_ids, host_ids, strict=True):
        want[on_pool] = host[on_host]
    dispatch.kv_swap(pool, host.contiguous(), impl=impl).swap_in(pool_ids, host_ids)
    assert torch.equal(pool, want)


@pytest.mark.parametrize("impl", IMPLS)
def test_layer_major_on_both_sides_has_no_runs(impl: str) -> None:
    """A block is several fragments, although each fragment ends where the next block's begins."""
    pool, host = torch.randn(4, 60, 16), torch.randn(4, 70, 16)
    want = pool.clone()
    want[:, 3:43] = host[:, 5:45]
    swap = dispatch.kv_swap(pool.transpose(0, 1), host.transpose(0, 1), impl=impl)
    swap.swap_in(torch.arange(3, 43), torch.arange(5, 45))
    assert torch.equal(pool, want)


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two views of one block shape: permuted, sliced and padded, each in its own way, over bytes of random values."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    sides = []
    for _ in range(2):
        blocks = draw(st.integers(2, 5))
        whole = [blocks, *(size + draw(st.integers(0, 2)) for size in shape)]
        order = draw(st.permutations(range(len(whole))))
        memory = torch.randint(0, 256, [math.prod(whole) + 3], dtype=torch.uint8)
        offset = draw(st.integers(0, 3))
        flat = memory[offset : offset + math.prod(whole)]
        stored = flat.view([whole[axis] for axis in order])
        view = stored.permute([order.index(axis) for axis in range(len(whole))])
        starts = [draw(st.integers(0, have - want)) for have, want in zip(whole[1:], shape, strict=True)]
        for axis, (start, size) in enumerate(zip(starts, shape, strict=True), 1):
            view = view.narrow(axis, start, size)
        sides.append(view)
    return sides[0], sides[1]


@pytest.mark.skipif("cpu" not in IMPLS, reason="the compiled library is not built")
@given(views(), st.sampled_from(DIRECTIONS), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=200)
def test_any_views(pair: tuple[torch.Tensor, torch.Tensor], direction: Direction, random: object) -> None:
    pool, host = pair
    count = min(len(pool), len(host)) - 1
    ids = [random.sample(range(len(side)), count) for side in pair]  # type: ignore[attr-defined]
    memories = [torch.empty(0, dtype=torch.uint8).set_(side.untyped_storage()) for side in pair]
    before = [memory.clone() for memory in memories]
    after = []
    for impl in ("reference", "cpu"):
        for memory, was in zip(memories, before, strict=True):
            memory.copy_(was)
        swap = dispatch.kv_swap(pool, host, impl=impl)
        (swap.swap_in if direction == "in" else swap.swap_out)(*ids)
        after.append([memory.clone() for memory in memories])
    for got, want in zip(*after, strict=True):
        assert torch.equal(got, want)


def block_major(blocks: int, layers: int, heads: int) -> torch.Tensor:
    return torch.empty(blocks, layers, 2, 16, heads, 128, dtype=torch.bfloat16, device="meta")


def test_whole_blocks_of_two_block_major_buffers_are_one_fragment() -> None:
    what = geometry(block_major(10, 36, 8), block_major(20, 36, 8))
    assert what.counts == (1,) and what.fragment == what.pool_block == what.host_block == 36 * 2 * 16 * 8 * 128 * 2
    assert what.word == 16


def test_layer_major_pool_has_a_fragment_for_keys_and_values_of_each_layer() -> None:
    pool = torch.empty(36, 2, 1000, 16, 8, 128, dtype=torch.bfloat16, device="meta")
    what = geometry(kv_view.block_view(pool, "layer-major"), block_major(20, 36, 8))
    assert what.fragment == 16 * 8 * 128 * 2 and what.counts == (72,)
    assert what.pool_strides == (1000 * what.fragment,) and what.host_strides == (what.fragment,)
    assert what.block_bytes == what.host_stretch == 72 * what.fragment


def test_heads_of_both_sides_are_rows_of_one_token() -> None:
    pool, host = block_major(10, 4, 8)[..., 2:4, :], block_major(10, 4, 2)
    what = geometry(pool, host)
    assert what.fragment == 2 * 128 * 2 and what.counts == (4 * 2 * 16,)
    assert what.host_stretch == what.block_bytes
    both = geometry(pool, block_major(10, 4, 8)[..., 4:6, :])
    assert both.host_stretch == both.fragment


@pytest.mark.parametrize("width", [656, 576, 4096, 8192, 16384, 18432, 24576, 131072, 8208, 1, 24])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_items_of_a_route(width: int, direction: Direction) -> None:
    pool = torch.empty(61, 1000, width, dtype=torch.uint8, device="meta").permute(1, 0, 2)
    r = route(geometry(pool, torch.empty(9, 61, width, dtype=torch.uint8, device="meta")), direction)
    assert r.items == r.splits * r.groups
    assert (r.splits - 1) * r.piece < width <= r.splits * r.piece
    assert r.splits == 1 or (r.rows == 1 and r.piece % 128 == 0)
    assert (r.groups - 1) * r.rows < 61 <= r.groups * r.rows
    assert r.piece * r.rows <= r.slot_bytes and r.slot_bytes % 128 == 0
    assert 1 <= r.ahead <= r.slots <= 16
    # What an SM has for one CTA, less the barriers.
    assert r.by_words or r.warps * r.slots * r.slot_bytes <= 200 * 1024
    assert r.by_words or width % 16 == 0


@pytest.mark.parametrize(
    ("width", "contiguous", "direction", "by_words", "multiprocessors"),
    [
        (16384, True, "in", False, 2),
        (512, True, "in", False, 2),  # 16 rows of the pool, one stretch of the host
        (512, True, "out", False, 2),
        (4096, False, "in", False, 4),
        (4096, False, "out", True, 4),
        (2048, False, "in", True, 4),
        (512, False, "out", True, 8),
        (656 * 64, True, "in", False, 2),
        (256, True, "in", False, 4),
        (128, True, "out", True, 4),
        (8, True, "in", True, 8),
    ],
)
def test_choice_of_kernel(
    width: int, contiguous: bool, direction: Direction, by_words: bool, multiprocessors: int
) -> None:
    pool = torch.empty(64, 1000, width, dtype=torch.uint8, device="meta").permute(1, 0, 2)
    host = torch.empty(50, 64, width if contiguous else 2 * width, dtype=torch.uint8, device="meta")[..., :width]
    r = route(geometry(pool, host), direction)
    assert (r.by_words, r.multiprocessors, r.rate) == (by_words, multiprocessors, 0)
    sparing = route(geometry(pool, host), direction, spare=True)
    # Stores at the rate of the link hold up everybody's memory traffic.
    assert (sparing.by_words, sparing.multiprocessors) == (by_words, 2)
    assert sparing.rate == (40_000 if direction == "out" else 0)


def test_the_cuda_library_is_compiled_and_loads_without_a_driver() -> None:
    lib = cuda_library.library()
    assert lib is not None, "nvcc is among the development tools: install the kernels again and read its errors"
    for name in ("open", "close", "submit", "prepare", "fill", "launch", "release"):
        assert lib[f"isthmus_kv_swap_{name}"]
    with pytest.raises(RuntimeError, match="swapping: CUDA error 1: invalid argument"):
        cuda_library.check(1, "swapping")


def staged(
    width: int, layers: int, direction: Direction, *, heads: slice = slice(None), cap: int = 32 << 20
) -> Stage | None:
    pool = torch.empty(layers, 1000, 4, width // 4, dtype=torch.uint8, device="meta").permute(1, 0, 2, 3)
    host = torch.empty(9, layers, 4, width // 4, dtype=torch.uint8, device="meta")
    return stage(geometry(pool[:, :, heads], host[:, :, heads]), direction, cap)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("width", "layers"), [(16384, 64), (656, 61), (8, 64), (65536, 128), (1000, 30)])
@pytest.mark.parametrize("cap", [1 << 20, 32 << 20, 100 << 20])
def test_slots_hold_whole_blocks_within_the_cap(direction: Direction, width: int, layers: int, cap: int) -> None:
    way = staged(width, layers, direction, cap=cap)
    if 2 * width * layers > cap:
        assert way is None
        return
    assert way is not None
    r = way.route
    assert 2 <= way.slots <= 4 and way.slot_blocks >= 1
    assert cap // 2 < way.nbytes <= cap
    # Staging has the host's layout, one block after the other.
    assert r.geometry.host_block == r.geometry.block_bytes == width * layers
    assert r.by_words == (width % 16 != 0 or width < 256)
    assert r.by_words or r.warps * r.slots * r.slot_bytes <= 200 * 1024


def test_blocks_in_pieces_on_the_host_are_not_staged() -> None:
    assert staged(16384, 64, "in") is not None
    assert staged(16384, 64, "in", heads=slice(1, 3)) is None
    assert staged(16384, 64, "in", cap=0) is None


def test_what_is_misaligned_on_the_host_alone_is_aligned_in_staging() -> None:
    pool = torch.empty(64, 100, 4096, dtype=torch.uint8).permute(1, 0, 2)
    host = torch.empty(2 + 9 * 64 * 4096, dtype=torch.uint8)[2:].view(9, 64, 4096)
    what = geometry(pool, host)
    way = stage(what, "out", 32 << 20)
    assert what.word == 2 and way is not None and way.route.geometry.word == 16 and not way.route.by_words
