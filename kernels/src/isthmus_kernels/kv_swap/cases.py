"""Cases that tests and the benchmark of the swap share: buffers of random bytes, and what must become of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isthmus_kernels.kv_swap.geometry import Direction
from isthmus_kernels.kv_view import Layout, block_view


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapBuffers:
    """Two buffers and the ids to swap, and what the whole memory of both must be afterwards."""

    pool: Tensor
    host: Tensor
    pool_ids: Tensor
    host_ids: Tensor
    want: tuple[Tensor, Tensor]

    def check(self) -> None:
        """Compare every byte of both buffers, those that the views leave out included."""
        for name, view, want in (("pool", self.pool, self.want[0]), ("host", self.host, self.want[1])):
            got = _memory(view).cpu()
            different = (got != want).nonzero().flatten()
            assert not len(different), f"{name}: {len(different)} bytes differ, the first at {int(different[0])}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapCase:
    """A pool of KV blocks, a host buffer and the part of each that is swapped.

    `layers` and `heads` are ranges of the pool; the host buffer holds just them when `compact`, else whole blocks.
    `offset` bytes before both buffers misalign them.
    """

    name: str
    blocks: int = 12
    slots: int = 2
    block_size: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    layout: Layout = "layer-major"
    layers: slice = field(default_factory=lambda: slice(None))
    heads: slice = field(default_factory=lambda: slice(None))
    compact: bool = False
    offset: int = 0

    def __str__(self) -> str:
        return self.name

    def build(self, direction: Direction, device: str = "cpu", *, pin: bool = False, seed: int = 0) -> SwapBuffers:
        """Lay both out over random bytes, draw ids at random, and work out the result by plain indexing."""
        generator = torch.Generator().manual_seed(seed)
        inner = (self.block_size, self.kv_heads, self.head_dim)
        block_major = (self.blocks, self.slots, 2, *inner)
        shape = block_major if self.layout == "block-major" else (self.slots, 2, self.blocks, *inner)
        pool = block_view(self._random(shape, generator, device, pin=False), self.layout)
        part = pool[:, self.layers, :, :, self.heads]
        if self.compact:
            host = self._random((self.blocks + 3, *part.shape[1:]), generator, "cpu", pin)
        else:
            whole = self._random((self.blocks + 3, *block_major[1:]), generator, "cpu", pin)
            host = whole[:, self.layers, :, :, self.heads]
        count = self.blocks - 2
        pool_ids = torch.randperm(self.blocks, generator=generator)[:count]
        host_ids = torch.randperm(self.blocks + 3, generator=generator)[:count]
        return SwapBuffers(
            pool=part,
            host=host,
            pool_ids=pool_ids,
            host_ids=host_ids,
            want=_expected(direction, part, host, pool_ids, host_ids),
        )

    def _random(self, shape: Sequence[int], generator: torch.Generator, device: str, pin: bool) -> Tensor:
        size = math.prod(shape) * self.dtype.itemsize
        memory = torch.randint(0, 256, (self.offset + size + 64,), dtype=torch.uint8, generator=generator)
        memory = (memory.pin_memory() if pin else memory).to(device)
        return memory[self.offset : self.offset + size].view(self.dtype).view(*shape)


def _memory(view: Tensor) -> Tensor:
    """All bytes of the storage behind `view`."""
    return torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())


def _expected(
    direction: Direction, pool: Tensor, host: Tensor, pool_ids: Tensor, host_ids: Tensor
) -> tuple[Tensor, Tensor]:
    memories = _memory(pool).cpu().clone(), _memory(host).clone()
    # As bytes, so that no NaN is changed on its way.
    on_pool, on_host = (
        memory.as_strided(
            (*view.shape, view.element_size()),
            (*(stride * view.element_size() for stride in view.stride()), 1),
            view.storage_offset() * view.element_size(),
        )
        for memory, view in zip(memories, (pool, host), strict=True)
    )
    for a, b in zip(pool_ids.tolist(), host_ids.tolist(), strict=True):
        if direction == "in":
            on_pool[a] = on_host[b]
        else:
            on_host[b] = on_pool[a]
    return memories


# Every shape of copy that a pool asks for: layouts, ranges, sizes that no wide access divides, misaligned buffers.
SWAP_CASES = (
    SwapCase(name="layer-major"),
    SwapCase(name="block-major", layout="block-major"),
    *(SwapCase(name=f"{n}-layers", slots=n, block_size=2, head_dim=32) for n in (1, 61, 80)),
    SwapCase(name="fragment-16k", block_size=16, kv_heads=4, head_dim=128),
    SwapCase(name="fragment-18k", block_size=16, kv_heads=1, head_dim=576),
    SwapCase(name="block-of-576k", layout="block-major", slots=18, block_size=16, kv_heads=4, head_dim=128),
    SwapCase(name="layers-1-to-3", slots=5, layers=slice(1, 3)),
    SwapCase(name="layers-1-to-3-block-major", slots=5, layers=slice(1, 3), layout="block-major"),
    SwapCase(name="layers-compact", slots=5, layers=slice(2, 5), compact=True),
    SwapCase(name="one-head", kv_heads=4, heads=slice(1, 2)),
    SwapCase(name="heads-compact", kv_heads=4, heads=slice(2, 4), compact=True),
    SwapCase(name="heads-compact-block-major", kv_heads=4, heads=slice(2, 4), compact=True, layout="block-major"),
    SwapCase(name="layers-and-heads", slots=4, kv_heads=4, layers=slice(1, 3), heads=slice(0, 3)),
    SwapCase(name="head-dim-80", head_dim=80, kv_heads=3),
    SwapCase(name="rows-of-656", dtype=torch.uint8, kv_heads=1, head_dim=656, block_size=16),
    SwapCase(name="scales", dtype=torch.uint8, kv_heads=3, head_dim=1, block_size=5),
    SwapCase(name="odd", dtype=torch.uint8, kv_heads=1, head_dim=24, block_size=1),
    *(SwapCase(name=f"offset-{n}", dtype=torch.uint8, head_dim=80, offset=n) for n in (1, 2, 4, 8)),
    *(SwapCase(name=f"offset-{n}-16k", block_size=16, kv_heads=4, head_dim=128, offset=n) for n in (2, 4, 8)),
)
