"""kv_swap on a GPU: every byte of both buffers, the order of streams, threads, graphs, far offsets, memory."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from isthmus_kernels import dispatch
from isthmus_kernels.kv_swap.cases import SWAP_CASES, SwapCase
from isthmus_kernels.kv_swap.cuda_impl import STAGING_BYTES, CudaSwap, Thresholds
from isthmus_kernels.kv_swap.geometry import DIRECTIONS, Direction, geometry, route
from isthmus_kernels.kv_swap.swap import Done, KvSwap

pytestmark = pytest.mark.gpu

# Enough blocks that every warp has several batches; fragments on either side of each choice of kernel.
MANY = [
    SwapCase(name=f"many-{layout}-{tokens * 256}", layout=layout, slots=slots, block_size=tokens, blocks=700)
    for layout, slots in (("layer-major", 3), ("block-major", 1))
    for tokens in (1, 2, 8, 16, 32, 64)
]


def run(swap: KvSwap, direction: Direction, *arguments: object, **options: object) -> Done:
    return (swap.swap_in if direction == "in" else swap.swap_out)(*arguments, **options)  # type: ignore[arg-type]


WAYS: dict[str, dict[str, Any]] = {
    "engine": {"engine_from": 1, "rows_from": 1 << 60},
    "rows": {"engine_from": 1 << 30, "rows_from": 1},
    "kernels": {"engine_from": 512 << 10, "stage_bytes": 0, "spare_multiprocessors": False},
    "sparing kernels": {"engine_from": 512 << 10, "rows_from": 1 << 60, "hand_over_from": 1},
    "staged": {"engine_from": 1 << 30, "stage_from": 1, "spare_multiprocessors": False},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("case", [*SWAP_CASES, *MANY], ids=str)
def test_both_whole_buffers(case: SwapCase, direction: Direction, way: str) -> None:
    buffers = case.build(direction, "cuda", pin=True)
    swap = dispatch.kv_swap(buffers.pool, buffers.host, impl="cuda", **WAYS[way])
    run(swap, direction, buffers.pool_ids, buffers.host_ids.int()).synchronize()
    buffers.check()
    swap.close()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("order", ["random", "runs"])
@pytest.mark.parametrize("slot_blocks", [1, 3, 16])
def test_staging_takes_turns(direction: Direction, order: str, slot_blocks: int) -> None:
    """Many swaps through few slots, one after the other without a wait, with pages for fewer pairs than a swap has."""
    case = SwapCase(name="staged", blocks=500, slots=7, block_size=16)
    generator = torch.Generator().manual_seed(3)
    buffers = case.build(direction, "cuda", pin=True)
    nbytes = buffers.pool[0].nbytes
    swap = dispatch.kv_swap(
        buffers.pool,
        buffers.host,
        impl="cuda",
        rows_from=1 << 60,
        stage_from=1,
        stage_bytes=4 * slot_blocks * nbytes,
        staging_bytes=4096,
    )
    want = {"pool": buffers.pool.cpu(), "host": buffers.host.clone()}
    for turn in range(30):
        if order == "random":
            pool_ids = torch.randperm(500, generator=generator)[:200]
            host_ids = torch.randperm(503, generator=generator)[:200]
        else:  # on the host: rising and falling stretches of 25 blocks
            pool_ids = torch.randperm(500, generator=generator)[:250]
            host_ids = torch.arange(turn, turn + 250).view(10, 25).flip(1 if turn % 2 else 0).flatten()
        done = run(swap, direction, pool_ids, host_ids)
        if direction == "in":
            want["pool"][pool_ids] = want["host"][host_ids]
        else:
            want["host"][host_ids] = want["pool"][pool_ids]
    done.synchronize()
    for name, view in (("pool", buffers.pool.cpu()), ("host", buffers.host)):
        assert torch.equal(view.view(torch.int16), want[name].view(torch.int16)), name
    swap.close()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("multiprocessors", [1, 3, 132])
@pytest.mark.parametrize(("warps", "slots", "ahead"), [(1, 1, 1), (2, 16, 3), (4, 3, 1), (8, 3, 3), (16, 2, 2)])
@pytest.mark.parametrize("form", ["ring", "words"])
def test_any_route(direction: Direction, multiprocessors: int, warps: int, slots: int, ahead: int, form: str) -> None:
    buffers = SwapCase(name="4 KiB rows", blocks=90, slots=3, block_size=16).build(direction, "cuda", pin=True)
    chosen = {
        d: replace(
            route(geometry(buffers.pool, buffers.host), d),
            multiprocessors=multiprocessors,
            warps=warps,
            slots=slots,
            ahead=ahead,
            by_words=form == "words",
            rows=1,
            slot_bytes=4096,
        )
        for d in DIRECTIONS
    }
    swap = CudaSwap(
        buffers.pool, buffers.host, chosen, dict.fromkeys(DIRECTIONS), Thresholds(engine=1 << 30), STAGING_BYTES
    )
    run(swap, direction, buffers.pool_ids, buffers.host_ids).synchronize()
    buffers.check()
    swap.close()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("step", [1, -1])
def test_runs_of_ids_are_one_copy(direction: Direction, step: int) -> None:
    """Blocks of 4 KiB in runs of 1 to 300: short runs go through the kernels, long ones to the engine."""
    pool = torch.randint(0, 256, (2000, 4096), dtype=torch.uint8).cuda()
    host = torch.randint(0, 256, (2500, 4096), dtype=torch.uint8).pin_memory()
    pool_ids: list[int] = []
    host_ids: list[int] = []
    for length in (1, 300, 2, 64, 63, 65, 200, 1):
        at = len(pool_ids)
        rising = range(at + 40, at + 40 + length)
        pool_ids += rising if step == 1 else reversed(rising)
        host_ids += (i + 371 for i in (rising if step == 1 else reversed(rising)))
    want = (pool.cpu(), host.clone())
    if direction == "in":
        want[0][pool_ids] = host[host_ids]
    else:
        want[1][host_ids] = pool.cpu()[pool_ids]
    run(dispatch.kv_swap(pool, host), direction, pool_ids, host_ids).synchronize()
    assert torch.equal(pool.cpu(), want[0]) and torch.equal(host, want[1])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_layer_major_on_both_sides_has_no_runs(direction: Direction) -> None:
    """A block is several fragments, although each fragment ends where the next block's begins."""
    pool = torch.randint(0, 256, (4, 60, 16384), dtype=torch.uint8)
    host = torch.randint(0, 256, (4, 70, 16384), dtype=torch.uint8).pin_memory()
    want = (pool.clone(), host.clone())
    ids = torch.arange(40)
    if direction == "in":
        want[0][:, ids] = host[:, ids + 5]
    else:
        want[1][:, ids + 5] = pool[:, ids]
    pool = pool.cuda()
    run(dispatch.kv_swap(pool.transpose(0, 1), host.transpose(0, 1)), direction, ids, ids + 5).synchronize()
    assert torch.equal(pool.cpu(), want[0]) and torch.equal(host, want[1])


@pytest.mark.parametrize("width", [24, 512, 16384])
@pytest.mark.parametrize("limit", [2**31, 2**32], ids=["int32", "uint32"])
def test_far_blocks(width: int, limit: int) -> None:
    stride = limit // 3 + 64
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 9 GB of free device memory")
    pool = torch.empty(3 * stride + width, dtype=torch.bfloat16, device="cuda").as_strided((4, width), (stride, 1))
    pool.zero_()
    host = torch.randn(4, width).bfloat16().pin_memory()
    swap = dispatch.kv_swap(pool, host)
    swap.swap_in([3, 2], [0, 1]).synchronize()
    assert torch.equal(pool[3].cpu(), host[0]) and torch.equal(pool[2].cpu(), host[1])
    assert pool[:2].count_nonzero() == 0
    swap.swap_out([3], [2]).synchronize()
    assert torch.equal(host[2], host[0])


def test_last_of_120000_blocks() -> None:
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 32 GB of free device memory")
    pool = torch.empty(120_000, 131_072, dtype=torch.bfloat16, device="cuda")
    host = torch.randn(3, 131_072).bfloat16().pin_memory()
    for engine_from in (1, 1 << 30):  # by the copy engine and by the kernels
        pool[119_998:] = float("nan")
        swap = dispatch.kv_swap(pool, host, engine_from=engine_from)
        swap.swap_in([119_999], [1]).synchronize()
        assert torch.equal(pool[119_999].cpu(), host[1]) and pool[119_998].isnan().all()
        swap.swap_out([119_999], [2]).wait()
        torch.cuda.synchronize()
        assert torch.equal(host[2], host[1])


def test_bad_ids_are_named_and_nothing_is_copied() -> None:
    pool, host = torch.zeros(6, 4096, device="cuda"), torch.ones(5, 4096).pin_memory()
    swap = dispatch.kv_swap(pool, host)
    for pool_ids, host_ids, message in (
        ([0, -1], [0, 2], r"pool_ids\[1\] = -1 is negative"),
        ([0, 6], [2, 3], r"pool_ids\[1\] = 6 is >= num_blocks 6"),
        ([0, 1], [2, 5], r"host_ids\[1\] = 5 is >= num_blocks 5"),
        ([0, 2, 0], [2, 3, 4], r"pool_ids\[2\] = 0 repeats pool_ids\[0\]"),
        ([0, 1], [3], "host_ids has 1 ids but pool_ids has 2"),
        ([0, 1 << 32], [0, 1], r"pool_ids\[1\] = 4294967296 is >="),
    ):
        with pytest.raises(ValueError, match=message):
            swap.swap_in(pool_ids, host_ids)
        with pytest.raises(ValueError, match=message):
            swap.prepare("in", 10).fill(pool_ids, host_ids)
    torch.cuda.synchronize()
    assert pool.count_nonzero() == 0
    swap.swap_in([0, 1], [4, 4]).synchronize()
    assert pool.count_nonzero() == 2 * 4096


def test_buffers_that_a_gpu_cannot_swap_are_refused() -> None:
    with pytest.raises(ValueError, match="not in pinned memory; allocate it with pin_memory=True"):
        dispatch.kv_swap(torch.zeros(4, 8, device="cuda"), torch.zeros(4, 8))
    with pytest.raises(ValueError, match="expected a tensor in host memory"):
        dispatch.kv_swap(torch.zeros(4, 8, device="cuda"), torch.zeros(4, 8, device="cuda"))


def test_a_copy_waits_for_the_compute_that_wrote() -> None:
    pool, host = torch.zeros(64, 8192, device="cuda"), torch.full((64, 8192), -1.0).pin_memory()
    swap = dispatch.kv_swap(pool, host)
    ids = torch.arange(64)
    old = torch.cuda.Event()
    old.record()
    old.synchronize()
    torch.cuda._sleep(100_000_000)
    pool.fill_(7)
    wrote = torch.cuda.Event()
    wrote.record()
    # What goes wrong without the edge: the copy overtakes the compute and takes what was there before.
    swap.swap_out(ids, ids, after=old).synchronize()
    assert not wrote.query() and host.eq(0).all(), "the test's compute ended too soon to show anything"
    swap.swap_out(ids, ids, after=wrote).synchronize()
    assert host.eq(7).all()
    torch.cuda._sleep(100_000_000)
    pool.fill_(8)
    swap.swap_out(ids, ids).synchronize()  # the current stream by default
    assert host.eq(8).all()


def test_reuse_waits_for_the_copy() -> None:
    pool, host = torch.ones(2000, 65536, device="cuda"), torch.zeros(2000, 65536).pin_memory()
    swap = dispatch.kv_swap(pool, host)
    ids = torch.arange(2000)
    swap.swap_out(ids, ids).wait()
    pool.fill_(float("nan"))
    torch.cuda.synchronize()
    assert host.eq(1).all()
    # And the other way: the copy back waits for the fill, the reader for the copy.
    swap.swap_in(ids, ids).wait()
    assert pool.eq(1).all()


def test_eight_threads_and_two_directions() -> None:
    per, rounds, width = 40, 100, 4096
    pool = torch.zeros(8 * per, width, dtype=torch.int32, device="cuda")
    out = torch.zeros(8 * per, width, dtype=torch.int32).pin_memory()
    source = torch.arange(8 * per, dtype=torch.int32)[:, None].expand(-1, width).contiguous().pin_memory()
    into, back = dispatch.kv_swap(pool, source), dispatch.kv_swap(pool, out)
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            stream = torch.cuda.Stream()
            generator = torch.Generator().manual_seed(thread)
            with torch.cuda.stream(stream):
                for _ in range(rounds):
                    mine = torch.randperm(per, generator=generator) + thread * per
                    other = torch.randperm(per, generator=generator) + thread * per
                    arrived = into.swap_in(mine, other)
                    back.swap_out(mine, mine, after=arrived).synchronize()
                    assert torch.equal(out[mine, 0].long(), other) and torch.equal(out[mine, -1].long(), other)
                    assert out[mine].eq(other[:, None]).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_captured_swap_sees_new_ids_at_each_replay(direction: Direction) -> None:
    pool = torch.randn(50, 3, 2048, device="cuda")
    host = torch.randn(60, 3, 2048).pin_memory()
    swap = dispatch.kv_swap(pool, host)
    prepared = swap.prepare(direction, 30)
    prepared.launch()  # nothing filled: nothing copied; the kernel is loaded before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool.add_(1)
        prepared.launch()
        with pytest.raises(RuntimeError, match="capture a prepare"):
            swap.swap_in([0], [0])
    want_pool, want_host = pool.cpu(), host.clone()
    for seed, count in enumerate((30, 1, 0, 17)):
        generator = torch.Generator().manual_seed(seed)
        pool_ids = torch.randperm(50, generator=generator)[:count]
        host_ids = torch.randperm(60, generator=generator)[:count]
        prepared.fill(pool_ids, host_ids)
        graph.replay()
        torch.cuda.synchronize()
        want_pool += 1
        if direction == "in":
            want_pool[pool_ids] = want_host[host_ids]
        else:
            want_host[host_ids] = want_pool[pool_ids]
        assert torch.equal(pool.cpu(), want_pool) and torch.equal(host, want_host)


def test_staging_stays_within_its_cap_and_all_memory_comes_back() -> None:
    pool = torch.zeros(3000, 1024, dtype=torch.int32, device="cuda")
    host = torch.arange(3000, dtype=torch.int32)[:, None].expand(-1, 1024).contiguous().pin_memory()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        # 4 pages of 126 pairs: 3,000 blocks take 24 of them.
        swap = dispatch.kv_swap(pool, host, staging_bytes=4096, stage_bytes=1 << 20)
        assert torch.cuda.memory_allocated() == before + 2 * (1 << 20)
        for count in range(1, 3000, 15):
            ids = torch.arange(count)
            swap.swap_in(ids, ids)
        swap.swap_in(torch.arange(3000), torch.arange(3000).flip(0)).synchronize()
        assert torch.equal(pool.cpu(), host.flip(0))
        swap.close()
        swap.close()
        assert torch.cuda.memory_allocated() == before


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
def test_second_device() -> None:
    buffers = SWAP_CASES[0].build("in", "cuda:1", pin=True)
    dispatch.kv_swap(buffers.pool, buffers.host).swap_in(buffers.pool_ids, buffers.host_ids).synchronize()
    buffers.check()
    assert torch.cuda.current_device() == 0


def test_rows_further_apart_than_the_copy_engine_takes() -> None:
    """A layer-major pool of so many blocks that a layer has more than 2 GiB."""
    blocks, fragment = 300_000, 8192
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 5 GB of free device memory")
    pool = torch.empty(2, blocks, fragment, dtype=torch.uint8, device="cuda").transpose(0, 1)
    pool[-2:] = 7
    host = torch.randint(0, 256, (3, 2, fragment), dtype=torch.uint8).pin_memory()
    swap = dispatch.kv_swap(pool, host)
    swap.swap_in([blocks - 1], [1]).synchronize()
    assert torch.equal(pool[-1].cpu(), host[1]) and pool[-2].eq(7).all()
    swap.swap_out([blocks - 1], [2]).synchronize()
    assert torch.equal(host[2], host[1])
