"""KV layer specs, how they share one pool of blocks, and what each group needs for a length.

A *group* is a set of layers that use one block table. All groups take ids from one pool, and an id names the same
bytes for every group, so a block is as large as the largest group's pages together.

Adding a kind of layer: one row in ``KINDS`` (its page and its demand), and, if it keeps less than the whole prefix,
its rule in ``GroupPlan.blocks_needed`` and ``GroupPlan.hit_run``.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

# Bytes of one element, and bytes of scales per token and head (once for K, once for V).
DTYPES: dict[str, tuple[int, int]] = {
    "fp32": (4, 0),
    "bf16": (2, 0),
    "fp16": (2, 0),
    "fp8": (1, 0),
    "fp8_e4m3": (1, 0),
    "fp8_e5m2": (1, 0),
    "int8": (1, 0),
    "fp8_per_token_head": (1, 4),
    "int8_per_token_head": (1, 4),
}


@dataclass(frozen=True, slots=True)
class KindRule:
    """Fields that a kind of layer takes, and whether it keeps the whole prefix."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    whole_prefix: bool = True


_HEADS = ("layers", "kv_heads", "head_dim", "block_size", "dtype")
KINDS: dict[str, KindRule] = {
    "full": KindRule(_HEADS, ("head_dim_v",)),
    "sliding": KindRule((*_HEADS, "window"), ("head_dim_v",), whole_prefix=False),
    "mla": KindRule(("layers", "width", "block_size", "dtype")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """``layers`` identical layers of one rank.

    Fields:
        kind: ``full``, ``sliding`` or ``mla``.
        layers: how many.
        block_size: tokens per block.
        dtype: a name in ``DTYPES``.
        kv_heads: KV heads on this rank (after tensor parallelism); not for MLA.
        head_dim: elements of K per head; ``head_dim_v`` of V, the same unless given.
        window: sliding window in tokens, the current one included.
        width: MLA only: latent plus rope elements per token.
    """

    kind: str
    layers: int
    block_size: int
    dtype: str
    kv_heads: int | None = None
    head_dim: int | None = None
    head_dim_v: int | None = None
    window: int | None = None
    width: int | None = None

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer: block_size * kv_heads * (d_k + d_v) * element, plus scales."""
        element, scale = DTYPES[self.dtype]
        if self.width is not None:
            return self.block_size * (self.width * element + scale)
        assert self.kv_heads is not None and self.head_dim is not None, f"{self.kind} needs kv_heads and head_dim"
        head_dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        return self.block_size * self.kv_heads * ((self.head_dim + head_dim_v) * element + 2 * scale)

    @property
    def window_or_none(self) -> int | None:
        """The window that bounds the demand, or None when the whole prefix is kept."""
        return None if KINDS[self.kind].whole_prefix else self.window


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One group: its block size and how many blocks a request needs in it.

    Fields:
        block_size: tokens per block.
        window: sliding window in tokens, or None when the whole prefix is kept.
        tokens_in_flight: F = max_num_batched_tokens * batches in flight: tokens that may be written before the
            oldest position of the window is given back.
    """

    block_size: int
    window: int | None = None
    tokens_in_flight: int = 0

    @property
    def kind(self) -> str:
        """``full`` (whole prefix: also MLA) or ``sliding``."""
        return "full" if self.window is None else "sliding"

    def blocks_needed(self, length: int) -> int:
        """Most blocks that a request of ``length`` tokens ever holds in this group.

        Full: ceil(L / bs). Sliding: ceil(min(w - 1 + F, L) / bs) + 1; the extra block because a window need not
        start at a block's boundary.
        """
        if length <= 0:
            return 0
        if self.window is None:
            return ceil_div(length, self.block_size)
        return ceil_div(min(self.window - 1 + self.tokens_in_flight, length), self.block_size) + 1

    def passed(self, length: int) -> int:
        """Leading blocks that no position from ``length`` on looks back at: position p sees those after p - w."""
        return 0 if self.window is None else max(0, length - self.window + 1) // self.block_size

    def hit_run(self, blocks: int) -> int:
        """How many of the last ``blocks`` cached blocks a hit of that many blocks really needs.

        A sliding layer computing the next token looks back at w - 1 tokens: ceil((w - 1) / bs) blocks.
        """
        if self.window is None:
            return blocks
        return min(blocks, ceil_div(self.window - 1, self.block_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlacement:
    """Where one layer's page lies in a block of its rank (block-major).

    Fields:
        spec, index: the ``index``-th layer of the rank's ``spec``-th ``LayerSpec``.
        group: index into ``KvPlan.groups``.
        slot: position among the layers of its group.
        offset: bytes from the start of the block.
        page_bytes: bytes of its page.
    """

    spec: int
    index: int
    group: int
    slot: int
    offset: int
    page_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """One rank's own groups.

    Fields:
        demands: (block_size, window) of each group.
        placements: every layer, by group and slot. ``group`` counts this rank's groups.
        bytes_per_block: the largest group's bytes; smaller groups are padded.
    """

    demands: tuple[tuple[int, int | None], ...]
    placements: tuple[LayerPlacement, ...]
    bytes_per_block: int


def ceil_div(a: int, b: int) -> int:
    """Integer ceil(a / b): exact at any size, unlike a float."""
    return -(-a // b)


def group_layers(specs: Sequence[LayerSpec]) -> RankGroups:
    """Group one rank's layers.

    Layers with one demand (block size and window) share block tables whatever their page sizes. With one demand
    there is one group. With several, each demand's layers are split so that groups weigh about the same: the unit
    is the smallest demand's bytes, or the largest's when that is less than 1.5 times the smallest's (padding a
    little costs less than an almost empty group). A demand of n units becomes ceil(n) groups and its layer i goes to
    group i mod k. With one page size this is the rule of equal layer counts; with mixed page sizes each block packs
    its group's pages one after another (block-major).
    """
    members: dict[tuple[int, int | None], list[tuple[int, int]]] = {}
    for number, spec in enumerate(specs):
        demand = (spec.block_size, spec.window_or_none)
        members.setdefault(demand, []).extend((number, index) for index in range(spec.layers))
    weights = {demand: sum(specs[number].page_bytes for number, _ in layers) for demand, layers in members.items()}
    smallest, largest = min(weights.values()), max(weights.values())
    unit = largest if 2 * largest < 3 * smallest else smallest

    demands: list[tuple[int, int | None]] = []
    placements: list[LayerPlacement] = []
    bytes_per_block = 0
    for demand, layers in members.items():
        parts = min(len(layers), ceil_div(weights[demand], unit))
        for part in range(parts):
            offset = 0
            for slot, (number, index) in enumerate(layers[part::parts]):
                page = specs[number].page_bytes
                placements.append(
                    LayerPlacement(
                        spec=number, index=index, group=len(demands), slot=slot, offset=offset, page_bytes=page
                    )
                )
                offset += page
            bytes_per_block = max(bytes_per_block, offset)
            demands.append(demand)
    return RankGroups(demands=tuple(demands), placements=tuple(placements), bytes_per_block=bytes_per_block)


def blocks_needed(groups: Iterable[GroupPlan], length: int) -> int:
    """Most blocks that one request of ``length`` tokens ever holds: the sum over groups, never their maximum."""
    return sum(group.blocks_needed(length) for group in groups)


def max_len_that_fits(groups: Sequence[GroupPlan], usable: int, limit: int) -> int:
    """Largest length in 0..``limit`` whose ``blocks_needed`` is at most ``usable``; 0 when not even one token fits."""
    low, high = 0, max(0, limit)
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_needed(groups, middle) <= usable:
            low = middle
        else:
            high = middle - 1
    return low


def agree_hit_length(groups: Sequence[GroupPlan], is_cached: Callable[[int, int], bool], num_tokens: int) -> int:
    """Longest prefix, in tokens, that is a hit in every group at once.

    Starts with the groups that keep the whole prefix (any shorter prefix is a hit too), then lets the sliding
    groups shrink it, over and over, until nobody does: a fixed point. At most ``num_tokens - 1`` tokens hit, because
    one must be computed to have logits.

    Args:
        is_cached: (group, block index) -> whether that full block is visible.
    """
    length = max(0, num_tokens - 1)
    order = sorted(range(len(groups)), key=lambda number: groups[number].window is not None)
    while True:
        before = length
        for number in order:
            length = _shrink(groups[number], number, is_cached, length)
        if length == before:
            return length


def _shrink(group: GroupPlan, number: int, is_cached: Callable[[int, int], bool], length: int) -> int:
    blocks = length // group.block_size
    if group.window is None:
        hit = 0
        while hit < blocks and is_cached(number, hit):
            hit += 1
        return hit * group.block_size
    # Right to left: the last place where enough blocks in a row are cached, or where the run reaches the start.
    needed = ceil_div(group.window - 1, group.block_size)
    if needed == 0:
        return blocks * group.block_size
    end, run = blocks, 0
    for index in range(blocks - 1, -1, -1):
        if is_cached(number, index):
            run += 1
            if run == needed:
                return end * group.block_size
        else:
            end, run = index, 0
    return end * group.block_size
