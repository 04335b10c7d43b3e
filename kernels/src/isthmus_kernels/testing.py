"""What tests and benchmarks of the kernels share: paged cases with poisoned memory, and tolerances.

Everything that an op must not read holds NaN: pool blocks outside the tables, the unused end of each
request's last block, and the other layers. Everything that it must write holds NaN before the call.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus_kernels.fp8_linear.reference import quantize
from isthmus_kernels.kv_view import Layout, layer_view

# Relative and absolute bound on |got - want| by the dtype of the result, for values of order one.
TOLERANCES = {torch.float32: (1e-4, 2e-5), torch.bfloat16: (1.6e-2, 1e-2)}

GARBAGE_ID = -7


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run the body with `count` threads for torch and the compiled library, of the calling thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """Return a tensor of NaN."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def assert_close(got: Tensor, want: Tensor) -> None:
    """Compare with the tolerance of `got`'s dtype; a NaN on either side fails."""
    rtol, atol = TOLERANCES[got.dtype]
    torch.testing.assert_close(got.float(), want.float(), rtol=rtol, atol=atol)


def scales_like(pool: Tensor, slot: int, layout: Layout) -> Tensor:
    """Return poisoned scales of layer `slot` of `pool`, which is of 8-bit floats: a view, as that of the layer is."""
    return layer_view(poisoned(*pool.shape[:5], 1, device=pool.device), slot, layout)[..., 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCase:
    """One batch over a paged pool: arguments of `paged_attention`, and how many tokens are real."""

    q: Tensor
    pool: Tensor
    kv: Tensor
    scales: Tensor | None
    block_tables: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    positions: Tensor
    max_query_len: int
    max_seq_len: int
    tokens: int


def paged_case(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype = torch.float32,
    layout: Layout = "block-major",
    spare_tokens: int = 0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> PagedCase:
    """Build a case: request r has ``context_lens[r]`` cached tokens before its ``query_lens[r]`` new ones.

    Blocks are drawn in random order from a pool of two layers, of which layer 1 is used. `spare_tokens`
    rows at the end of q belong to no request. The numbers are made on the CPU, the same for every `device`.
    """
    generator = torch.Generator().manual_seed(seed)
    seq_lens = [q + c for q, c in zip(query_lens, context_lens, strict=True)]
    counts = [-(-length // block_size) for length in seq_lens]
    blocks = sum(counts) + 3
    layer_shape = (block_size, kv_heads, head_dim)
    shape = (blocks, 2, 2, *layer_shape) if layout == "block-major" else (2, 2, blocks, *layer_shape)
    pool = poisoned(*shape, dtype=kv_dtype)
    kv = layer_view(pool, 1, layout)
    scales = scales_like(pool, 1, layout) if kv_dtype == torch.float8_e4m3fn else None
    free = iter(torch.randperm(blocks, generator=generator).tolist())
    tables = torch.full((len(seq_lens), max(counts, default=0) + 2), GARBAGE_ID, dtype=torch.int32)
    slots: list[int] = []
    positions: list[int] = []
    for row, (count, length) in enumerate(zip(counts, seq_lens, strict=True)):
        ids = list(itertools.islice(free, count))
        tables[row, :count] = torch.tensor(ids, dtype=torch.int32)
        data = torch.randn(length, 2, kv_heads, head_dim, generator=generator)
        numbers, own_scales = (data.to(kv_dtype), data) if scales is None else quantize(data)
        for index, block in enumerate(ids):
            inside = slice(index * block_size, (index + 1) * block_size)
            part = numbers[inside].transpose(0, 1)
            kv[block, :, : part.shape[1]] = part
            if scales is not None:
                scales[block, :, : part.shape[1]] = own_scales[inside].transpose(0, 1)
        for token in range(length - query_lens[row], length):
            slots.append(ids[token // block_size] * block_size + token % block_size)
            positions.append(token)
    tokens = sum(query_lens)
    starts = list(itertools.accumulate(query_lens, initial=0))
    pool = pool.to(device)
    return PagedCase(
        q=torch.randn(tokens + spare_tokens, heads, head_dim, generator=generator).to(device, dtype),
        pool=pool,
        kv=layer_view(pool, 1, layout),
        scales=None if scales is None else scales.to(device),
        block_tables=tables.to(device),
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(seq_lens, default=0),
        tokens=tokens,
    )
