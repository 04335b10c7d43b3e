"""What a swap copies, as bytes: the block's contiguous fragments, and how warps share them out. Pure arithmetic."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

Direction = Literal["in", "out"]  # host to pool, pool to host
DIRECTIONS: tuple[Direction, Direction] = ("in", "out")

DIMS = 4
_LINE = 128  # bytes that move together on the link and in the cache: pieces end at multiples of it
_PIECE = 8192  # per warp and load: 8 warps of 3 pieces are 192 KiB in flight, twice what the link's latency asks for
_WARPS, _WORD_WARPS = 8, 16
_MAX_SLOTS = 16
# Below these, as bytes that are contiguous in host memory, one bulk copy costs more than its bytes (README).
_RING_FROM = {"in": 4096, "out": 8192}
_ROW = 256  # and so it does for rows of the pool that are shorter than this
_SMALL = 1024  # below this, plain loads and stores need twice the multiprocessors
_LONG = 32768  # from here on, half of them keep the link full
# On an H200 (PCIe 5.0 x16, 55 GB/s) two multiprocessors that store 40 GB/s to the host make a decode step 5.5% longer,
# without a limit 78%.
_SPARED, _SPARED_RATE = 2, 40_000
_STAGE_SLOTS = 4
_STAGE_MULTIPROCESSORS = 4  # move bytes between staging and pool several times as fast as the link brings them


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """A block as ``prod(counts)`` fragments; all numbers but the counts are bytes.

    `counts` and the strides of both sides run from the innermost dimension outwards and have at least one
    entry. `word` is the widest access (16, 8, 4, 2 or 1 bytes) that is aligned everywhere and loses no byte,
    `pool_word` the widest that is on the pool's side.
    """

    fragment: int
    counts: tuple[int, ...]
    pool_strides: tuple[int, ...]
    host_strides: tuple[int, ...]
    pool_block: int
    host_block: int
    word: int
    pool_word: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.fragment * math.prod(self.counts)

    @property
    def host_stretch(self) -> int:
        """Bytes of a block that are contiguous in the host buffer."""
        stretch = self.fragment
        for count, stride in zip(self.counts, self.host_strides, strict=True):
            if stride != stretch:
                break
            stretch *= count
        return stretch


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How one direction of a `Geometry` runs. An item is what one warp moves at a time (items.h)."""

    geometry: Geometry
    piece: int
    splits: int
    rows: int
    by_words: bool
    multiprocessors: int
    warps: int
    slots: int
    slot_bytes: int
    ahead: int
    rate: int = 0  # MB/s that the kernel holds itself to; 0: as fast as it goes

    @property
    def groups(self) -> int:
        """Items along the innermost dimension."""
        return -(-self.geometry.counts[0] // self.rows)

    @property
    def items(self) -> int:
        """Items of a block."""
        return self.splits * self.groups * math.prod(self.geometry.counts[1:])

    def shape(self) -> tuple[int, ...]:
        """The numbers of `SwapShape` (items.h), in its order."""
        g = self.geometry

        def padded(values: tuple[int, ...], fill: int) -> tuple[int, ...]:
            return values + (fill,) * (DIMS - len(values))

        return (
            g.fragment,
            self.piece,
            self.splits,
            self.rows,
            self.groups,
            self.items,
            *padded(g.counts, 1),
            *padded(g.pool_strides, 0),
            *padded(g.host_strides, 0),
            g.pool_block,
            g.host_block,
            g.word,
        )

    def pack(self) -> tuple[int, ...]:
        """The numbers of `Route` (cuda/kv_swap.cu), in its order."""
        return (
            *self.shape(),
            int(self.by_words),
            self.multiprocessors,
            self.warps,
            self.slots,
            self.slot_bytes,
            self.ahead,
            self.rate,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The way through device memory: `slots` of `slot_blocks` blocks each, laid out as on the host.

    The copy engine moves whole blocks between host and slot, a kernel runs `route` between slot and pool.
    """

    route: Route
    slots: int
    slot_blocks: int

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_blocks * self.route.geometry.block_bytes

    def pack(self, memory: int) -> tuple[int, ...]:
        """The numbers of `Stage` (cuda/kv_swap.cu), in its order; `memory` is the address of the slots, 0: unused."""
        return *self.route.pack(), self.slots, self.slot_blocks, memory


def geometry(pool: Tensor, host: Tensor) -> Geometry:
    """Work out what a swap between two views of blocks copies.

    Both are ``[blocks, ...]`` with equal shapes after dimension 0, equal dtypes and any strides: whole blocks, or
    the same slice of them (`kv_view.block_view`). Raises one ValueError with all that is wrong.
    """
    problems = []
    if pool.dtype != host.dtype:
        problems.append(f"host: dtype {host.dtype} differs from the pool's {pool.dtype}")
    if pool.dim() < 2 or pool.shape[1:] != host.shape[1:]:
        problems.append(
            f"host: expected [blocks, ...] with the block shape of the pool {tuple(pool.shape)}, got "
            f"{tuple(host.shape)} (slice both to the same layers and heads)"
        )
    if 0 in pool.shape[1:]:
        problems.append(f"pool: a block of shape {tuple(pool.shape[1:])} has no elements")
    for name, view in (("pool", pool), ("host", host)):
        if any(view.shape[d] > 1 and view.stride(d) == 0 for d in range(view.dim())):
            problems.append(f"{name}: an expanded view (stride 0) has one memory for many elements")
        if view.shape[0] >= 2**32:
            problems.append(f"{name}: {view.shape[0]} blocks are more than ids of 32 bits can name")
    if problems:
        raise ValueError("kv_swap: " + "; ".join(problems))
    fragment = pool.element_size()
    dims: list[tuple[int, int, int]] = []  # count, pool stride, host stride; innermost first
    for d in range(pool.dim() - 1, 0, -1):
        count = pool.shape[d]
        strides = pool.stride(d) * pool.element_size(), host.stride(d) * host.element_size()
        if count == 1:
            continue
        if not dims and strides == (fragment, fragment):
            fragment *= count
        elif dims and strides == (dims[-1][0] * dims[-1][1], dims[-1][0] * dims[-1][2]):
            dims[-1] = (dims[-1][0] * count, *dims[-1][1:])
        else:
            dims.append((count, *strides))
    if len(dims) > DIMS:
        raise ValueError(
            f"kv_swap: a block of shape {tuple(pool.shape[1:])} with strides {pool.stride()[1:]} in the pool and "
            f"{host.stride()[1:]} in the host buffer has {len(dims)} separate dimensions; at most {DIMS} can be copied"
        )
    counts, pool_strides, host_strides = zip(*dims or [(1, fragment, fragment)], strict=True)
    blocks = pool.stride(0) * pool.element_size(), host.stride(0) * host.element_size()
    pool_word = math.gcd(16, fragment, *pool_strides, blocks[0], pool.data_ptr())
    word = math.gcd(pool_word, *host_strides, blocks[1], host.data_ptr())
    return Geometry(
        fragment=fragment,
        counts=counts,
        pool_strides=pool_strides,
        host_strides=host_strides,
        pool_block=blocks[0],
        host_block=blocks[1],
        word=word,
        pool_word=pool_word,
    )


def route(geometry: Geometry, direction: Direction, *, spare: bool = False) -> Route:
    """Choose kernel, pieces and grid for one direction: the fewest multiprocessors that fill the link.

    `spare`: for swaps beside other kernels. Two multiprocessors at most, and stores to the host are held below the
    link's rate: at the link's rate they fill the queues of everybody's memory traffic.
    """
    g = geometry
    if g.fragment > _PIECE:
        splits = -(-g.fragment // _PIECE)
        piece = -(-g.fragment // splits // _LINE) * _LINE
        splits, rows = -(-g.fragment // piece), 1
    else:
        piece, splits = g.fragment, 1
        groups = -(-g.counts[0] // max(1, _PIECE // g.fragment))
        rows = -(-g.counts[0] // groups)
    # One bulk copy takes all rows of an item where they are contiguous, and each row by itself where not.
    bulk = piece * rows if g.host_strides[0] == g.fragment else piece
    by_words = g.word < 16 or piece < _ROW or bulk < _RING_FROM[direction]
    slot_bytes = -(-piece * rows // _LINE) * _LINE
    slots = min(_MAX_SLOTS, 3 * _PIECE // slot_bytes)
    if by_words:
        chosen = 8 if bulk < _SMALL else 4
    else:
        chosen = 2 if g.host_stretch >= _LONG and piece >= 2 * _ROW else 4
    if spare:
        chosen = min(chosen, _SPARED)
    return Route(
        geometry=g,
        piece=piece,
        splits=splits,
        rows=rows,
        by_words=by_words,
        multiprocessors=chosen,
        warps=_WORD_WARPS if by_words else _WARPS,
        slots=slots,
        slot_bytes=slot_bytes,
        ahead=slots - 1 if direction == "in" else (slots + 1) // 2,
        rate=_SPARED_RATE if spare and direction == "out" else 0,
    )


def stage(geometry: Geometry, direction: Direction, cap: int) -> Stage | None:
    """Plan the way through at most `cap` bytes of device memory.

    None where there is none: a block is not contiguous on the host, or fewer than two fit.
    """
    g = geometry
    slots = min(_STAGE_SLOTS, cap // g.block_bytes)
    if g.host_stretch != g.block_bytes or slots < 2:
        return None
    between = route(replace(g, host_block=g.block_bytes, word=g.pool_word), direction)
    by_words = g.pool_word < 16 or between.piece < _ROW
    return Stage(
        route=replace(
            between,
            by_words=by_words,
            warps=_WORD_WARPS if by_words else _WARPS,
            multiprocessors=_STAGE_MULTIPROCESSORS,
            ahead=(between.slots + 1) // 2,
        ),
        slots=slots,
        slot_blocks=cap // slots // g.block_bytes,
    )
