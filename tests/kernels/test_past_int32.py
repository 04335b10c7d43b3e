"""Offsets past 2^31 and 2^32 elements: padded strides over memory that is reserved but never touched."""

import pytest
import torch

from isthmus_kernels import dispatch, native
from isthmus_kernels.device import interpreted
from isthmus_kernels.testing import assert_close, paged_case

TRITON = ["triton"] if interpreted() else []
IMPLS = ["torch", "reference", *(["cpu"] if native.available() else []), *TRITON]
BLOCK_SIZE, KV_HEADS, DIM = 16, 2, 64
BLOCK = 2 * BLOCK_SIZE * KV_HEADS * DIM


@pytest.fixture(params=[2**31, 2**32], ids=["int32", "uint32"])
def pool(request: pytest.FixtureRequest) -> torch.Tensor:
    """A bf16 pool of four blocks whose block 3 begins just past the limit."""
    stride = request.param // 3 + 64
    elements = 3 * stride + BLOCK
    # The system commits only the pages that are written, so the 9 GB are address space.
    flat = torch.empty(elements, dtype=torch.bfloat16)
    shape = (4, 2, BLOCK_SIZE, KV_HEADS, DIM)
    view = flat.as_strided(shape, (stride, BLOCK // 2, KV_HEADS * DIM, DIM, 1)).zero_()
    assert 3 * view.stride(0) > request.param
    return view


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("query_len", [1, 30])
def test_attention_reads_the_far_block(pool: torch.Tensor, impl: str, query_len: int) -> None:
    case = paged_case(
        [query_len],
        [47 - query_len],
        heads=4,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        block_size=BLOCK_SIZE,
        kv_dtype=torch.bfloat16,
    )
    far = torch.tensor([[3, 2, 1]], dtype=torch.int32)
    for index, block in enumerate(case.block_tables[0, :3].tolist()):
        pool[far[0, index]] = case.kv[block]
    out = []
    for kv, table, chosen in ((case.kv, case.block_tables, "reference"), (pool, far, impl)):
        out.append(
            dispatch.paged_attention(
                case.q,
                kv,
                table,
                case.query_start_loc,
                case.seq_lens,
                scale=DIM**-0.5,
                max_query_len=query_len,
                max_seq_len=47,
                impl=chosen,
            )
        )
    assert_close(out[1], out[0])


@pytest.mark.parametrize("impl", [name for name in IMPLS if name != "torch"])
def test_write_reaches_the_far_block(pool: torch.Tensor, impl: str) -> None:
    qkv = torch.randn(1, (2 + 2 * KV_HEADS) * DIM)
    cos, sin = torch.ones(4, DIM // 2), torch.zeros(4, DIM // 2)
    slot = torch.tensor([3 * BLOCK_SIZE + 5])
    dispatch.rope_kv_write(qkv, torch.tensor([1]), cos, sin, pool, slot, num_heads=2, impl=impl)
    written = qkv.view(1, -1, DIM)[0, 2:].bfloat16()
    assert torch.equal(pool[3, 0, 5], written[:KV_HEADS])
    assert torch.equal(pool[3, 1, 5], written[KV_HEADS:])
    assert pool[:3].count_nonzero() == 0 and pool[3].count_nonzero() == 2 * KV_HEADS * DIM


@pytest.mark.parametrize("impl", ["torch", "reference", *TRITON])
def test_copy_reaches_the_far_block(pool: torch.Tensor, impl: str) -> None:
    pool[0] = torch.randn(pool.shape[1:]).bfloat16()
    dispatch.block_copy(pool, [0], [3], impl=impl)
    assert torch.equal(pool[3], pool[0])
    dispatch.block_copy(pool, [3], [1], impl=impl)
    assert torch.equal(pool[1], pool[0])
