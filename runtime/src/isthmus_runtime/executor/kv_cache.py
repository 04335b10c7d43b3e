"""The one creator of KV tensors: for every role, every layout and every profile run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..errors import ConfigError
from ..interfaces.transport import KvRegion
from ..kv.groups import LayerPlacement, LayerSpec, RankGroups
from ..kv.plan import KvPlan
from ..kv.pool_records import NULL_BLOCK
from ..layers.batch import LayerKv
from .device.base import KV_NAMES, Device

# Of each block: a cache line, and what a DMA engine likes.
_ALIGN = 64
# Bytes of a scale.
_SCALE = 4
LAYOUTS = ("block-major", "layer-major")


def _page(spec: LayerSpec) -> tuple[int, ...]:
    if spec.width is not None:
        return (1, spec.block_size, 1, spec.width)
    assert spec.kv_heads is not None and spec.head_dim is not None
    return (2, spec.block_size, spec.kv_heads, spec.head_dim)


class KvCache:
    """Keys and values of all layers, in blocks.

    A page is the keys and values of one layer in one block. In 8-bit floats (E4M3) each head of a token has a scale,
    and the scales, fp32 [2, block_size, Hk], lie behind the page's numbers: a block is still one run of bytes, so that
    what moves, seals or copies blocks need not know.

    Layouts:
        block-major: `[num_blocks, slots, 2, block_size, Hk, D]`, a block of all layers in one run (with pages of
            several sizes, each block packs its layers' pages one after another, as the plan says).
        layer-major: `[slots, 2, num_blocks, block_size, Hk, D]`, behind it the scales of all pages in the same order;
            pages of one size only, no transfer.

    The pool is zero, hence finite, until it is written.

    Attributes:
        layers: of each model layer, its group and its views of the pool.
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
        self._bytes = device.pool(self.num_blocks * self.block_stride)
        self._scaled = dtype == torch.float8_e4m3fn
        first = [0]
        for spec in specs:
            first.append(first[-1] + spec.layers)
        views: dict[int, LayerKv] = {}
        for place in own.placements:
            spec = specs[place.spec]
            assert KV_NAMES[dtype] == spec.dtype, (dtype, spec)
            page = _page(spec)
            of_page = self._block_major if layout == "block-major" else self._layer_major
            views[first[place.spec] + place.index] = LayerKv(place.group, *of_page(place, page, own))
        self.layers = [views[number] for number in range(first[-1])]
        self._digest = hashlib.sha256(repr((layout, dtype, self.block_bytes, specs, own)).encode()).hexdigest()[:16]

    def _block_major(
        self, place: LayerPlacement, page: tuple[int, ...], own: RankGroups
    ) -> tuple[Tensor, Tensor | None]:
        del own
        parts, size, heads, dim = page
        token = heads * dim
        block = self.block_stride // self.dtype.itemsize
        pages = self._view(self.dtype, page, (block, size * token, token, dim, 1), place.offset)
        if not self._scaled:
            return pages, None
        block, at = self.block_stride // _SCALE, place.offset + parts * size * token
        return pages, self._view(torch.float32, page[:3], (block, size * heads, heads, 1), at)

    def _layer_major(
        self, place: LayerPlacement, page: tuple[int, ...], own: RankGroups
    ) -> tuple[Tensor, Tensor | None]:
        if any(other.page_bytes != place.page_bytes for other in own.placements):
            raise ConfigError("--kv-layout layer-major needs layers with pages of one size; use block-major")
        parts, size, heads, dim = page
        token = heads * dim
        part = self.num_blocks * size * token
        at = place.slot * parts * part * self.dtype.itemsize
        pages = self._view(self.dtype, page, (size * token, part, token, dim, 1), at)
        if not self._scaled:
            return pages, None
        slots = own.bytes_per_block // place.page_bytes
        part = self.num_blocks * size * heads
        at = slots * parts * part * dim + place.slot * parts * part * _SCALE
        return pages, self._view(torch.float32, page[:3], (size * heads, part, heads, 1), at)

    def _view(self, dtype: torch.dtype, page: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
        """Of all blocks, from `offset` bytes on."""
        return self._bytes.view(dtype).as_strided((self.num_blocks, *page), strides, offset // dtype.itemsize)

    def memory(self) -> KvRegion:
        """The pool as plain memory."""
        return KvRegion(
            base=self._bytes.data_ptr(),
            num_blocks=self.num_blocks,
            block_bytes=self.block_bytes,
            block_stride=self.block_stride,
            layout_digest=self._digest,
            rank=self._rank,
            device=self._device,
            in_runs=self.layout == "block-major",
        )

    def free(self) -> None:
        """Give the memory back. Whoever still holds a view or an address must be done with it."""
        self.layers = []
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def poison(self, block_ids: Iterable[int] | None = None) -> None:
        """Fill blocks (None: all but the null block) with NaN, so that a read of bytes nobody wrote shows. For tests:
        it commits the memory."""
        ids = [block for block in (range(self.num_blocks) if block_ids is None else block_ids) if block != NULL_BLOCK]
        for layer in self.layers:
            layer.pages[ids] = float("nan")
            if layer.scales is not None:
                layer.scales[ids] = float("nan")
