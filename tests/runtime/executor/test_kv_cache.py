"""The KV pool: addresses, layouts, laziness."""

from __future__ import annotations

import resource

import pytest
import torch

from isthmus_runtime.errors import ConfigError
from isthmus_runtime.executor.device.cpu import CpuDevice
from isthmus_runtime.executor.kv_cache import KvCache
from isthmus_runtime.kv.groups import LayerSpec
from isthmus_runtime.kv.plan import KvPlan, KvPlanInput, plan


def specs_of(
    *windows: int | None, block_size: int = 4, kv_heads: int = 3, head_dim: int = 10, dtype: str = "fp32"
) -> tuple[LayerSpec, ...]:
    return tuple(
        LayerSpec(
            kind="full" if window is None else "sliding",
            layers=2,
            block_size=block_size,
            dtype=dtype,
            kv_heads=kv_heads,
            head_dim=head_dim,
            window=window,
        )
        for window in windows
    )


def plan_of(specs: tuple[LayerSpec, ...], num_blocks: int) -> KvPlan:
    return plan(
        KvPlanInput(
            ranks=(specs,),
            available_bytes=(1 << 50,),
            max_model_len=1,
            max_num_batched_tokens=1,
            num_blocks_override=num_blocks,
        )
    )


@pytest.mark.parametrize("layout", ["block-major", "layer-major"])
@pytest.mark.parametrize("windows", [(None,), (None, 8), (8, None, 16)])
def test_every_element_of_every_layer_is_its_own(layout: str, windows: tuple[int | None, ...]) -> None:
    """Groups share bytes by block id; within a group no two layers, blocks or tokens may."""
    specs = specs_of(*windows)
    cache = KvCache(plan_of(specs, 6), specs, torch.float32, layout, CpuDevice())
    assert len(cache.layers) == 2 * len(windows)
    for group in {layer.group for layer in cache.layers}:
        views = [layer.pages for layer in cache.layers if layer.group == group]
        for number, view in enumerate(views):
            assert view.shape == (6, 2, 4, 3, 10)
            view.copy_(torch.arange(view.numel(), dtype=torch.float32).reshape(view.shape) + number * 10_000)
        for number, view in enumerate(views):
            assert torch.equal(view.reshape(-1), torch.arange(view.numel(), dtype=torch.float32) + number * 10_000)


@pytest.mark.parametrize("layout", ["block-major", "layer-major"])
@pytest.mark.parametrize("windows", [(None,), (None, 8), (8, None, 16)])
def test_every_number_and_scale_of_8_bit_floats_is_its_own(layout: str, windows: tuple[int | None, ...]) -> None:
    specs = specs_of(*windows, dtype="fp8_per_token_head")
    cache = KvCache(plan_of(specs, 6), specs, torch.float8_e4m3fn, layout, CpuDevice())
    for group in {layer.group for layer in cache.layers}:
        layers = [layer for layer in cache.layers if layer.group == group]
        for number, layer in enumerate(layers):
            assert layer.scales is not None and layer.scales.shape == layer.pages.shape[:4] == (6, 2, 4, 3)
            layer.pages.copy_((torch.arange(layer.pages.numel()) % 13 + number).reshape(layer.pages.shape))
            layer.scales.copy_((torch.arange(layer.scales.numel()) + number * 10_000).reshape(layer.scales.shape))
        for number, layer in enumerate(layers):
            assert layer.scales is not None
            want = torch.arange(layer.pages.numel()) % 13 + number
            assert torch.equal(layer.pages.reshape(-1).float(), want.float())
            assert torch.equal(layer.scales.reshape(-1), torch.arange(layer.scales.numel()) + number * 10_000.0)


def test_a_block_of_8_bit_floats_is_one_run_of_half_the_bytes() -> None:
    specs = specs_of(None, 8, dtype="fp8_per_token_head", head_dim=64)
    cache = KvCache(plan_of(specs, 7), specs, torch.float8_e4m3fn, "block-major", CpuDevice())
    memory = cache.memory()
    heads = 2 * 2 * 4 * 3
    assert memory.block_bytes == heads * (64 + 4) < 0.54 * heads * 64 * 2
    for layer in cache.layers:
        assert layer.scales is not None
        for block in range(7):
            first = memory.base + block * memory.block_stride
            for part in (layer.pages[block], layer.scales[block]):
                assert part.is_contiguous()
                assert first <= part.data_ptr() <= first + memory.block_bytes - part.nbytes
    cache.poison([3])
    assert all(layer.scales is not None and layer.scales[3].isnan().all() for layer in cache.layers)


def test_block_major_block_is_one_aligned_run() -> None:
    specs = specs_of(None, 8)
    cache = KvCache(plan_of(specs, 7), specs, torch.float32, "block-major", CpuDevice())
    memory = cache.memory()
    assert memory.base % 64 == 0 and memory.block_stride % 64 == 0
    assert memory.block_stride >= memory.block_bytes == 2 * 2 * 4 * 3 * 10 * 4
    for view in (layer.pages for layer in cache.layers):
        for block in range(7):
            first = view[block].data_ptr()
            assert memory.base + block * memory.block_stride <= first
            assert first + view[block].nbytes <= memory.base + block * memory.block_stride + memory.block_bytes
            assert view[block].is_contiguous()


def test_layout_digest_tells_layouts_apart() -> None:
    def digest(specs: tuple[LayerSpec, ...], dtype: torch.dtype = torch.float32) -> str:
        return KvCache(plan_of(specs, 9), specs, dtype, "block-major", CpuDevice()).memory().layout_digest

    same = specs_of(None)
    assert digest(same) == digest(specs_of(None))
    others = [specs_of(None, block_size=8), specs_of(None, kv_heads=2), specs_of(None, 8)]
    assert len({digest(same), *map(digest, others)}) == 4
    assert digest(specs_of(None, dtype="bf16"), torch.bfloat16) != digest(
        specs_of(None, dtype="fp8_per_token_head"), torch.float8_e4m3fn
    )


@pytest.mark.parametrize(("layout", "in_runs"), [("block-major", True), ("layer-major", False)])
def test_memory_says_whether_a_block_is_one_run(layout: str, in_runs: bool) -> None:
    specs = specs_of(None)
    memory = KvCache(plan_of(specs, 3), specs, torch.float32, layout, CpuDevice()).memory()
    assert (memory.in_runs, memory.num_blocks, memory.device) == (in_runs, 3, "cpu")


def test_unknown_layout_is_refused() -> None:
    specs = specs_of(None)
    with pytest.raises(ConfigError, match="'diagonal'"):
        KvCache(plan_of(specs, 3), specs, torch.float32, "diagonal", CpuDevice())


def test_a_large_pool_is_not_committed_and_reads_zero() -> None:
    specs = specs_of(None, block_size=16, kv_heads=8, head_dim=128)
    size = plan_of(specs, 2).bytes_per_block
    count = (12 << 30) // size
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cache = KvCache(plan_of(specs, count), specs, torch.float32, "block-major", CpuDevice())
    view = cache.layers[1].pages
    view[count - 1, 1] = 3.0
    assert float(view[count - 1, 0].abs().max()) == 0 and float(view[count - 1, 1].min()) == 3
    # Addresses far past 2^31 elements, and next to no memory.
    assert view[count - 1].data_ptr() - view[0].data_ptr() == (count - 1) * cache.block_stride > 2**33
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_poison_spares_the_null_block() -> None:
    specs = specs_of(None)
    cache = KvCache(plan_of(specs, 4), specs, torch.float32, "block-major", CpuDevice())
    cache.poison([0, 2])
    for view in (layer.pages for layer in cache.layers):
        assert view[2].isnan().all() and not view[[0, 1, 3]].isnan().any()
    cache.poison()
    for view in (layer.pages for layer in cache.layers):
        assert view[1:].isnan().all() and not view[0].isnan().any()
