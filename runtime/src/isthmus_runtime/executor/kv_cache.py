"""The one creator of KV tensors: for every role, every layout and every profile run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from ..errors import ConfigError
from ..interfaces.transport import KvRegion
from ..kv.groups import LayerSpec, RankGroups
from ..kv.plan import KvPlan
from .device.base import KV_NAMES, Device

NULL_BLOCK = 0
# Of each block: a cache line, and what a DMA engine likes.
_ALIGN = 64
LAYOUTS = ("block-major", "layer-major")


def _page(spec: LayerSpec) -> tuple[int, ...]:
    if spec.width is not None:
        return (1, spec.block_size, 1, spec.width)
    assert spec.kv_heads is not None and spec.head_dim is not None
    return (2, spec.block_size, spec.kv_heads, spec.head_dim)


class KvCache:
    """Keys and values of all layers, in blocks.

    Layouts:
        block-major: `[num_blocks, slots, 2, block_size, Hk, D]`, a block of all layers in one run (with pages of
            several sizes, each block packs its layers' pages one after another, as the plan says).
        layer-major: `[slots, 2, num_blocks, block_size, Hk, D]`; pages of one size only, no transfer.

    The pool is zero, hence finite, until it is written.

    Attributes:
        layers: per model layer, its group and its view `[num_blocks, 2, block_size, Hk, D]`; of latent attention
            `[num_blocks, 1, block_size, 1, W]`, one row a token.
    """

    def __init__(
        self,
        plan: KvPlan,
        specs: tuple[LayerSpec, ...],
        dtype: torch.dtype,
        layout: str,
        device: Device,
        *,
        rank: int = 0,
    ) -> None:
        """The pool of rank `rank` of the plan, whose layers are `specs`."""
        if layout not in LAYOUTS:
            raise ConfigError(f"--kv-layout {layout!r} is not supported; known: {', '.join(LAYOUTS)}")
        own = plan.ranks[rank]
        self.num_blocks = plan.num_blocks
        self.block_bytes = own.bytes_per_block
        self.block_stride = -(-self.block_bytes // _ALIGN) * _ALIGN
        self.layout = layout
        self.dtype = dtype
        self._device = device.name
        self._rank = rank
        self._pool = device.pool(self.num_blocks * self.block_stride).view(dtype)
        first = [0]
        for spec in specs:
            first.append(first[-1] + spec.layers)
        views: dict[int, tuple[int, Tensor]] = {}
        for place in own.placements:
            spec = specs[place.spec]
            assert KV_NAMES[dtype] == spec.dtype, (dtype, spec)
            page = _page(spec)
            view = (
                self._block_major(place.offset, page)
                if layout == "block-major"
                else self._layer_major(place.slot, place.page_bytes, page, own)
            )
            views[first[place.spec] + place.index] = (place.group, view)
        self.layers = [views[number] for number in range(first[-1])]
        self._digest = hashlib.sha256(repr((layout, dtype, self.block_bytes, specs, own)).encode()).hexdigest()[:16]

    def _block_major(self, offset: int, page: tuple[int, ...]) -> Tensor:
        parts, size, heads, dim = page
        strides = (self.block_stride // self.dtype.itemsize, size * heads * dim, heads * dim, dim, 1)
        return self._pool.as_strided((self.num_blocks, parts, size, heads, dim), strides, offset // self.dtype.itemsize)

    def _layer_major(self, slot: int, page_bytes: int, page: tuple[int, ...], own: RankGroups) -> Tensor:
        if any(place.page_bytes != page_bytes for place in own.placements):
            raise ConfigError("--kv-layout layer-major needs layers with pages of one size; use block-major")
        parts, size, heads, dim = page
        part = self.num_blocks * size * heads * dim
        strides = (size * heads * dim, part, heads * dim, dim, 1)
        return self._pool.as_strided((self.num_blocks, parts, size, heads, dim), strides, slot * parts * part)

    def memory(self) -> KvRegion:
        """The pool as plain memory, for a transport. ConfigError when a block is not one run."""
        if self.layout != "block-major":
            raise ConfigError(
                f"--kv-layout {self.layout} scatters a block over all layers, and a transfer moves blocks as one run; "
                "use --kv-layout block-major with --transfer-mode direct or store"
            )
        return KvRegion(
            base=self._pool.data_ptr(),
            num_blocks=self.num_blocks,
            block_bytes=self.block_bytes,
            block_stride=self.block_stride,
            layout_digest=self._digest,
            rank=self._rank,
            device=self._device,
        )

    def free(self) -> None:
        """Give the memory back. Whoever still holds a view or an address must be done with it."""
        self.layers = []
        self._pool = torch.empty(0, dtype=self.dtype)

    def poison(self, block_ids: Iterable[int] | None = None) -> None:
        """Fill blocks (None: all but the null block) with NaN, so that a read of bytes nobody wrote shows. For tests:
        it commits the memory."""
        ids = [block for block in (range(self.num_blocks) if block_ids is None else block_ids) if block != NULL_BLOCK]
        for _, view in self.layers:
            view[ids] = float("nan")
