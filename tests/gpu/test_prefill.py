"""The CUDA prefill kernel on a card: against the reference, over poisoned pools, past 2^32 elements, inside a graph."""

import logging

import pytest
import torch
from kernel_checks import attend, check_attention

from isthmus_kernels import dispatch
from isthmus_kernels.paged_attention import cuda_impl
from isthmus_kernels.testing import assert_close, paged_case, poisoned

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_kernels")]

BF16 = torch.bfloat16
QWEN3_8B = {"heads": 32, "kv_heads": 8, "head_dim": 128, "block_size": 16}


@pytest.mark.parametrize("layout", ["block-major", "layer-major"])
@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        ([2], [0]),
        ([32], [96]),
        ([33], [95]),
        ([128], [0]),
        ([700], [0]),
        ([2048], [1000]),
        ([300, 1, 1, 129], [1500, 800, 3, 64]),
        ([1, 0, 2, 0], [33, 0, 62, 0]),
        ([40] * 70, list(range(0, 700, 10))),
        ([3] * 300, [50] * 300),
        ([5000, 17], [0, 20_000]),
    ],
)
def test_batches(layout: str, query_lens: list[int], context_lens: list[int]) -> None:
    check_attention("cuda", "cuda", query_lens, context_lens, dtype=BF16, kv_dtype=BF16, layout=layout, **QWEN3_8B)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (32, 4), (14, 2), (8, 1), (128, 1)])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
def test_groups_and_block_sizes(heads: int, kv_heads: int, block_size: int) -> None:
    check_attention(
        "cuda",
        "cuda",
        [300, 7, 1, 129],
        [500, 80, 3, 64],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        block_size=block_size,
        dtype=BF16,
        kv_dtype=BF16,
    )


@pytest.mark.parametrize("length", range(2, 140, 3))
def test_every_tail(length: int) -> None:
    check_attention("cuda", "cuda", [length, 2], [0, length], dtype=BF16, kv_dtype=BF16, **QWEN3_8B)


def test_values_of_one_give_one() -> None:
    case = paged_case([200, 50], [3333, 20], dtype=BF16, kv_dtype=BF16, device="cuda", **QWEN3_8B)
    case.kv[:, 1] = torch.where(case.kv[:, 1].isnan(), float("nan"), 1.0)
    torch.testing.assert_close(attend(case, "cuda"), torch.ones_like(case.q), rtol=4e-3, atol=0)


def test_large_scores_do_not_overflow() -> None:
    case = paged_case([300], [500], dtype=BF16, kv_dtype=BF16, device="cuda", **QWEN3_8B)
    case.q.mul_(300)
    assert_close(attend(case, "cuda"), attend(case, "reference"))


def test_queries_inside_a_fused_projection() -> None:
    case = paged_case([200], [100], dtype=BF16, kv_dtype=BF16, device="cuda", **QWEN3_8B)
    fused = poisoned(200, 48 * 128, dtype=BF16, device="cuda")
    view = fused[:, : 32 * 128].view(200, 32, 128)
    view.copy_(case.q)
    got = dispatch.paged_attention(
        view,
        case.kv,
        case.block_tables,
        case.query_start_loc,
        case.seq_lens,
        scale=128**-0.5,
        max_query_len=200,
        max_seq_len=300,
        impl="cuda",
    )
    assert_close(got, attend(case, "reference"))


def test_half_precision() -> None:
    case = paged_case([200, 3], [100, 0], dtype=torch.float16, kv_dtype=torch.float16, device="cuda", **QWEN3_8B)
    got, want = attend(case, "cuda"), attend(case, "reference")
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


def test_what_shares_the_batch_changes_nothing() -> None:
    alone = paged_case([500], [700], dtype=BF16, kv_dtype=BF16, device="cuda", **QWEN3_8B)
    beside = paged_case([500, 900, 40], [700, 0, 2000], dtype=BF16, kv_dtype=BF16, device="cuda", **QWEN3_8B)
    beside.q[:500] = alone.q
    for ours, theirs in zip(alone.block_tables[0, :75].tolist(), beside.block_tables[0, :75].tolist(), strict=True):
        beside.kv[theirs] = alone.kv[ours]
    assert torch.equal(attend(beside, "cuda")[:500], attend(alone, "cuda"))


def test_blocks_past_32_bits() -> None:
    block, stride = 2 * 16 * 2 * 128, (2**32 // 3 + 64) // 8 * 8
    if torch.cuda.mem_get_info()[0] < 2 * (3 * stride + block) + (1 << 30):
        pytest.skip("not enough memory on the card")
    flat = torch.full((3 * stride + block,), float("nan"), dtype=BF16, device="cuda")
    pool = flat.as_strided((4, 2, 16, 2, 128), (stride, block // 2, 256, 128, 1))
    case = paged_case(
        [30], [17], heads=4, kv_heads=2, head_dim=128, block_size=16, dtype=BF16, kv_dtype=BF16, device="cuda"
    )
    assert cuda_impl.refusal(case.q, pool, case.q, window=None, softcap=None, sinks=None) is None
    far = torch.tensor([[3, 2, 1]], dtype=torch.int32, device="cuda")
    for place, own in zip(far[0].tolist(), case.block_tables[0, :3].tolist(), strict=True):
        pool[place] = case.kv[own]
    got = dispatch.paged_attention(
        case.q,
        pool,
        far,
        case.query_start_loc,
        case.seq_lens,
        scale=128**-0.5,
        max_query_len=30,
        max_seq_len=47,
        impl="cuda",
    )
    assert_close(got, attend(case, "reference"))


def test_a_graph_follows_lengths() -> None:
    """Captured once with bounds, replayed on other batches: each equals the reference."""
    rows, tokens = 6, 1200
    q = torch.zeros(tokens, 32, 128, dtype=BF16, device="cuda")
    pool = poisoned(700, 2, 16, 8, 128, dtype=BF16, device="cuda")
    tables = torch.zeros(rows, 300, dtype=torch.int32, device="cuda")
    starts = torch.zeros(rows + 1, dtype=torch.int32, device="cuda")
    lens = torch.zeros(rows, dtype=torch.int32, device="cuda")
    out = torch.empty_like(q)

    def step() -> None:
        dispatch.paged_attention(
            q, pool, tables, starts, lens, scale=128**-0.5, max_query_len=tokens, max_seq_len=4800, out=out, impl="cuda"
        )

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed, (queries, contexts) in enumerate(
        [([1200], [0]), ([5, 1, 300, 20], [900, 16, 15, 1]), ([2], [0]), ([128] * 6, [700] * 6), ([700], [4000])]
    ):
        case = paged_case(queries, contexts, dtype=BF16, kv_dtype=BF16, device="cuda", seed=seed, **QWEN3_8B)
        count = len(queries)
        q[: case.tokens] = case.q
        pool.fill_(float("nan"))
        pool[: case.kv.shape[0]] = case.kv
        tables[:count, : case.block_tables.shape[1]] = case.block_tables
        starts.fill_(case.tokens)
        starts[: count + 1] = case.query_start_loc
        lens.zero_()
        lens[:count] = case.seq_lens
        graph.replay()
        assert_close(out[: case.tokens], attend(case, "reference"))


def test_the_log_says_why_triton_runs(caplog: pytest.LogCaptureFixture) -> None:
    cuda_impl._log_refusal.cache_clear()
    case = paged_case([30], [17], heads=4, kv_heads=2, head_dim=64, block_size=16, device="cuda")
    with caplog.at_level(logging.INFO, logger="isthmus_kernels.paged_attention.cuda_impl"):
        for _ in range(2):
            assert_close(attend(case, "cuda"), attend(case, "reference"))
    assert caplog.messages == ["paged_attention on cuda: prefill by triton (head_dim 64, not 128)"]
