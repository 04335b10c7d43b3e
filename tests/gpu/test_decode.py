"""The CUDA decode kernel on a card: against the reference, over poisoned pools, past 2^32 elements, inside a graph."""

import pytest
import torch
from kernel_checks import attend, check_attention

from isthmus_kernels import dispatch
from isthmus_kernels.paged_attention import cuda_decode
from isthmus_kernels.testing import assert_close, paged_case, poisoned

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_kernels")]

BF16 = torch.bfloat16
QWEN3_8B = {"heads": 32, "kv_heads": 8, "head_dim": 128, "block_size": 16}


@pytest.mark.parametrize("layout", ["block-major", "layer-major"])
@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        ([1] * 128, [0] * 128),
        ([1] * 256, list(range(256))),
        ([1] * 512, [17] * 512),
        ([1] * 200, [9000, *[40] * 199]),
        ([1, 0, 5, 1, 1, 300] * 30, [33, 0, 62, 0, 700, 80] * 30),
        ([0] * 300, [0] * 300),
    ],
)
def test_batches(layout: str, query_lens: list[int], context_lens: list[int]) -> None:
    check_attention("cuda", "cuda", query_lens, context_lens, dtype=BF16, kv_dtype=BF16, layout=layout, **QWEN3_8B)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (32, 4), (14, 2), (8, 1), (15, 3)])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
def test_groups_and_block_sizes(heads: int, kv_heads: int, block_size: int) -> None:
    check_attention(
        "cuda",
        "cuda",
        [1] * 130,
        list(range(0, 390, 3)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        block_size=block_size,
        dtype=BF16,
        kv_dtype=BF16,
    )


def test_half_precision() -> None:
    case = paged_case([1] * 150, [99] * 150, dtype=torch.float16, kv_dtype=torch.float16, device="cuda", **QWEN3_8B)
    torch.testing.assert_close(attend(case, "cuda"), attend(case, "reference"), rtol=2e-3, atol=2e-3)


def test_large_scores_do_not_overflow() -> None:
    case = paged_case([1] * 150, [200] * 150, dtype=BF16, kv_dtype=BF16, device="cuda", **QWEN3_8B)
    case.q.mul_(300)
    assert_close(attend(case, "cuda"), attend(case, "reference"))


def test_the_same_bits_each_time() -> None:
    """Whichever program merges a request's parts."""
    case = paged_case([1] * 128, [4000, *[50] * 127], dtype=BF16, kv_dtype=BF16, device="cuda", **QWEN3_8B)
    first = attend(case, "cuda").clone()
    assert all(torch.equal(attend(case, "cuda"), first) for _ in range(20))


def test_blocks_past_32_bits() -> None:
    block, stride = 2 * 16 * 2 * 128, (2**32 // 3 + 64) // 8 * 8
    if torch.cuda.mem_get_info()[0] < 2 * (3 * stride + block) + (1 << 30):
        pytest.skip("not enough memory on the card")
    flat = torch.full((3 * stride + block,), float("nan"), dtype=BF16, device="cuda")
    pool = flat.as_strided((4, 2, 16, 2, 128), (stride, block // 2, 256, 128, 1))
    case = paged_case(
        [1], [46], heads=4, kv_heads=2, head_dim=128, block_size=16, dtype=BF16, kv_dtype=BF16, device="cuda"
    )
    far = torch.tensor([[3, 2, 1]] * 128, dtype=torch.int32, device="cuda")
    for place, own in zip(far[0].tolist(), case.block_tables[0, :3].tolist(), strict=True):
        pool[place] = case.kv[own]
    assert cuda_decode.takes(case.q, pool, far)
    got = dispatch.paged_attention(
        case.q[:1].repeat(128, 1, 1),
        pool,
        far,
        torch.arange(129, dtype=torch.int32, device="cuda"),
        case.seq_lens[:1].repeat(128),
        scale=128**-0.5,
        max_query_len=1,
        max_seq_len=47,
        impl="cuda",
    )
    assert_close(got, attend(case, "reference").repeat(128, 1, 1))


def test_a_graph_follows_lengths() -> None:
    """Captured once with bounds, replayed on other batches: each equals the reference."""
    rows = 256
    q = torch.zeros(rows, 32, 128, dtype=BF16, device="cuda")
    pool = poisoned(9000, 2, 16, 8, 128, dtype=BF16, device="cuda")
    tables = torch.zeros(rows, 300, dtype=torch.int32, device="cuda")
    starts = torch.zeros(rows + 1, dtype=torch.int32, device="cuda")
    lens = torch.zeros(rows, dtype=torch.int32, device="cuda")
    out = torch.empty_like(q)

    def step() -> None:
        dispatch.paged_attention(
            q, pool, tables, starts, lens, scale=128**-0.5, max_query_len=1, max_seq_len=4800, out=out, impl="cuda"
        )

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed, contexts in enumerate(([0] * 256, list(range(200)), [4000, 1, 2], [300] * 250)):
        count = len(contexts)
        case = paged_case([1] * count, contexts, dtype=BF16, kv_dtype=BF16, device="cuda", seed=seed, **QWEN3_8B)
        q[:count] = case.q
        pool.fill_(float("nan"))
        pool[: case.kv.shape[0]] = case.kv
        tables[:count, : case.block_tables.shape[1]] = case.block_tables
        starts.fill_(count)
        starts[: count + 1] = case.query_start_loc
        lens.zero_()
        lens[:count] = case.seq_lens
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out[:count], attend(case, "reference"))
        assert out[count:].isnan().all()
