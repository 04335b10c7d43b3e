"""Triton kernels on a card at real shapes: against their references, far past 2^32 elements, and inside a graph."""

from collections.abc import Callable

import pytest
import torch
from kernel_checks import (
    attend,
    check_attention,
    check_block_copy,
    check_draws,
    check_embedding,
    check_fp8,
    check_gated,
    check_linear,
    check_logprobs,
    check_lora,
    check_moe,
    check_moe_of_4_bits,
    check_moe_of_8_bits,
    check_norm_of_parts,
    check_norms,
    check_rope,
    check_sample,
    sampling_args,
)

from isthmus_kernels import dispatch, dispatch_logits, dispatch_weights, kv_view
from isthmus_kernels.testing import assert_close, paged_case, poisoned

pytestmark = pytest.mark.gpu

F32, BF16, E4M3 = torch.float32, torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


QWEN3_8B = {"heads": 32, "kv_heads": 8, "head_dim": 128, "block_size": 16}
QWEN3_30B = {"heads": 32, "kv_heads": 4, "head_dim": 128, "block_size": 16}
SMOLLM2 = {"heads": 9, "kv_heads": 3, "head_dim": 64, "block_size": 16}
LLAMA_70B_TP8 = {"heads": 8, "kv_heads": 1, "head_dim": 128, "block_size": 64}
GPT_OSS = {"heads": 64, "kv_heads": 8, "head_dim": 64, "block_size": 16}


@pytest.mark.parametrize("shape", [QWEN3_8B, QWEN3_30B, SMOLLM2, LLAMA_70B_TP8])
@pytest.mark.parametrize("layout", ["block-major", "layer-major"])
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        ([1], [0]),
        ([1], [9000]),
        ([1] * 40, list(range(0, 4000, 100))),
        ([1] + [1] * 20, [20_000] + [31] * 20),
        ([700], [0]),
        ([300, 1, 1, 129], [1500, 800, 3, 64]),
        ([1, 0, 2, 0], [33, 0, 62, 0]),
    ],
)
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_attention(
    shape: dict[str, int],
    layout: str,
    window: int | None,
    query_lens: list[int],
    context_lens: list[int],
    kv_dtype: torch.dtype,
) -> None:
    check_attention(
        "triton", "cuda", query_lens, context_lens, window=window, dtype=BF16, kv_dtype=kv_dtype, layout=layout, **shape
    )


@pytest.mark.parametrize("head_dim", [32, 80, 96, 256])
@pytest.mark.parametrize("block_size", [1, 8, 32])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(F32, F32), (F32, BF16), (BF16, BF16), (BF16, E4M3), (F32, E4M3)])
def test_attention_in_other_forms(head_dim: int, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    check_attention(
        "triton",
        "cuda",
        [1, 1, 60],
        [300, 0, 20],
        heads=6,
        kv_heads=2,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize(("softcap", "sinks"), [(2.0, False), (None, True), (3.0, True)])
@pytest.mark.parametrize("shape", [QWEN3_8B, GPT_OSS])
def test_soft_cap_and_sinks(shape: dict[str, int], softcap: float | None, sinks: bool, window: int | None) -> None:
    batch: tuple[list[int], list[int]] = ([1, 60, 1, 1], [900, 20, 3, 9000])
    for kv_dtype in (BF16, E4M3):
        kinds = {"dtype": BF16, "kv_dtype": kv_dtype}
        check_attention("triton", "cuda", *batch, window=window, softcap=softcap, sinks=sinks, **kinds, **shape)


@pytest.mark.parametrize(("query_lens", "context_lens"), [([1] * 5, [0, 15, 700, 33, 3000]), ([40, 1], [100, 9])])
def test_latent_rows(query_lens: list[int], context_lens: list[int]) -> None:
    """One KV head of DeepSeek's width."""
    shape = {"heads": 16, "kv_heads": 1, "head_dim": 576, "block_size": 16}
    check_attention("triton", "cuda", query_lens, context_lens, dtype=BF16, kv_dtype=BF16, **shape)


def test_values_of_one_give_one() -> None:
    case = paged_case([1, 50, 1], [3333, 20, 5], dtype=BF16, kv_dtype=BF16, device="cuda", **QWEN3_8B)
    case.kv[:, 1] = torch.where(case.kv[:, 1].isnan(), float("nan"), 1.0)
    torch.testing.assert_close(attend(case, "triton"), torch.ones_like(case.q), rtol=4e-3, atol=0)


@pytest.mark.parametrize("tokens", [1, 64, 3000])
@pytest.mark.parametrize("shape", [QWEN3_8B, SMOLLM2])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("layout", ["block-major", "layer-major"])
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_rope(tokens: int, shape: dict[str, int], norm: bool, layout: kv_view.Layout, kv_dtype: torch.dtype) -> None:
    check_rope(
        "triton",
        "cuda",
        tokens=tokens,
        heads=shape["heads"],
        kv_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        rotary=shape["head_dim"],
        dtype=BF16,
        kv_dtype=kv_dtype,
        q_norm=norm,
        k_norm=norm,
        layout=layout,
    )


@pytest.mark.parametrize("shape", [(1, 4096), (3, 2048), (600, 5120), (9, 16384), (2, 37)])
@pytest.mark.parametrize(("dtype", "weight_dtype"), [(BF16, BF16), (F32, F32)])
def test_norms(shape: tuple[int, int], dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    check_norms("triton", "cuda", *shape, dtype, weight_dtype)


@pytest.mark.parametrize("shape", [(1, 5, 576), (2, 256, 4096), (4, 64, 4096), (3, 17, 37)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_norm_of_sums_in_parts(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_norm_of_parts("cuda", *shape, dtype)


@pytest.mark.parametrize("shape", [(1, 12288), (300, 768), (40, 28672), (3, 37)])
def test_gated(shape: tuple[int, int]) -> None:
    check_gated("triton", "cuda", *shape, BF16)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(
    ("rows", "inputs", "widths", "rank"),
    [(1, 4096, (4096, 1024, 1024), 16), (33, 4096, (14336, 14336), 64), (700, 1000, (136,), 8)],
)
def test_lora(rows: int, inputs: int, widths: tuple[int, ...], rank: int, dtype: torch.dtype) -> None:
    check_lora("triton", "cuda", rows, inputs, widths, rank, dtype)


@pytest.mark.parametrize("block_dim", [0, 2])
@pytest.mark.parametrize(
    ("src", "dst"), [([], []), ([1], [0]), ([1, 1, 4], [2, 3, 5]), ([0, 1, 2], [1, 2, 3]), ([3, 4], [4, 3])]
)
def test_block_copy(block_dim: int, src: list[int], dst: list[int]) -> None:
    check_block_copy("triton", "cuda", block_dim, src, dst)


@pytest.mark.parametrize("filters", [(), ("top_k",), ("top_p",), ("min_p",), ("top_k", "top_p", "min_p")])
@pytest.mark.parametrize("vocab", [257, 151_936])
@pytest.mark.parametrize("rows", [1, 6, 100])
def test_sample(filters: tuple[str, ...], vocab: int, rows: int) -> None:
    check_sample("triton", "cuda", rows, vocab, filters, coarse=False, holes=vocab == 257, seed=rows)


def test_card_and_cpu_draw_alike() -> None:
    logits = torch.randn(200, 5000) * 3
    args = sampling_args(200, ("top_k", "top_p", "min_p"), "cpu", 5, 5000)
    there = dispatch_logits.sample(logits.cuda(), **{name: value.cuda() for name, value in args.items()}).cpu()
    # One in a thousand draws may lie within rounding of another token.
    assert (there != dispatch_logits.sample(logits, **args)).sum() <= 1


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_penalties(dtype: torch.dtype) -> None:
    vocab, count = 151_936, 12
    logits = (torch.randn(20, vocab) * 3).to(dtype)
    tokens = torch.randint(0, vocab, (60, 2000), dtype=torch.int32)
    tokens[:, 1000:] = tokens[:, :1000] % 50
    draws, rows = torch.randperm(20)[:count].sort().values, torch.randperm(60)[:count]
    ends = torch.randint(1, 2001, (count,))
    starts = ends // 3
    factors = [torch.rand(count) + 0.5 for _ in range(3)]
    want, got = logits.clone(), logits.cuda()
    dispatch_logits.penalize(want, tokens, draws, rows, starts, ends, *factors, most=2000, impl="reference")
    there = [tensor.cuda() for tensor in (tokens, draws, rows, starts, ends, *factors)]
    dispatch_logits.penalize(got, *there, most=2000)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5 if dtype is F32 else 1e-2, atol=1e-5)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("width", [1251, 100])
def test_masks(dtype: torch.dtype, width: int) -> None:
    logits = torch.randn(7, 10_007).to(dtype)
    rows = torch.randperm(7)[:4].sort().values
    masks = torch.randint(0, 256, (4, width), dtype=torch.uint8)
    want, got = logits.clone(), logits.cuda()
    dispatch_logits.mask_logits(want, rows, masks, impl="reference")
    dispatch_logits.mask_logits(got, rows.cuda(), masks.cuda())
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [1, 70])
def test_logprobs(dtype: torch.dtype, rows: int) -> None:
    check_logprobs("triton", "cuda", rows, 151_936, dtype)


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17])
@pytest.mark.parametrize(
    ("outputs", "columns"),
    [
        (6144, 4096),
        (4096, 4096),
        (24_576, 4096),
        (4096, 12_288),
        (2048, 5120),
        (512, 12_800),
        (259, 2560),
        (151_936, 1024),
        (2048, 768),
        (50, 70),
    ],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(rows: int, outputs: int, columns: int, with_bias: bool) -> None:
    check_linear("triton", "cuda", rows, outputs, columns, BF16, with_bias=with_bias)


def test_embedding() -> None:
    check_embedding("triton", "cuda", 151_936, 4096, BF16, BF16)


@pytest.mark.parametrize("tokens", [1, 3, 64, 300, 700, 2100, 9000])
@pytest.mark.parametrize(("count", "top_k", "hidden", "inner"), [(128, 8, 2048, 768), (8, 2, 512, 256)])
def test_moe(tokens: int, count: int, top_k: int, hidden: int, inner: int) -> None:
    check_moe("triton", "cuda", tokens, count, top_k, hidden, inner, BF16)


@pytest.mark.parametrize("tokens", [1, 3, 8, 16, 64, 300, 1100, 4100])
@pytest.mark.parametrize(("count", "top_k", "hidden", "inner"), [(32, 4, 2880, 2880), (8, 2, 544, 96)])
def test_moe_of_4_bits(tokens: int, count: int, top_k: int, hidden: int, inner: int) -> None:
    check_moe_of_4_bits("triton", "cuda", tokens, count, top_k, hidden, inner)


@pytest.mark.parametrize("tokens", [1, 4, 64, 300, 1100, 4100])
@pytest.mark.parametrize(("count", "top_k", "hidden", "inner"), [(128, 8, 2048, 768), (8, 2, 512, 256)])
def test_moe_of_8_bits(tokens: int, count: int, top_k: int, hidden: int, inner: int) -> None:
    check_moe_of_8_bits("triton", "cuda", tokens, count, top_k, hidden, inner)


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 300])
@pytest.mark.parametrize(("outputs", "columns"), [(6144, 4096), (4096, 12_288), (2048, 768), (48, 80)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_fp8(rows: int, outputs: int, columns: int, with_bias: bool) -> None:
    check_fp8("triton", "cuda", rows, outputs, columns, with_bias=with_bias)


@pytest.fixture(params=[2**31, 2**32], ids=["int32", "uint32"])
def far_pool(request: pytest.FixtureRequest) -> torch.Tensor:
    """A bf16 pool of four blocks of one layer whose block 3 begins just past the limit (up to 8.6 GB)."""
    block = 2 * 16 * 2 * 64
    stride = request.param // 3 + 64
    if torch.cuda.mem_get_info()[0] < 2 * (3 * stride + block) + (1 << 30):
        pytest.skip("not enough memory on the card")
    flat = torch.full((3 * stride + block,), float("nan"), dtype=BF16, device="cuda")
    return flat.as_strided((4, 2, 16, 2, 64), (stride, block // 2, 128, 64, 1))


@pytest.mark.parametrize("query_len", [1, 30])
def test_far_blocks(far_pool: torch.Tensor, query_len: int) -> None:
    case = paged_case(
        [query_len],
        [47 - query_len],
        heads=4,
        kv_heads=2,
        head_dim=64,
        block_size=16,
        dtype=BF16,
        kv_dtype=BF16,
        device="cuda",
    )
    want = attend(case, "reference")
    far = torch.tensor([[3, 2, 1]], dtype=torch.int32, device="cuda")
    for place, block in zip(far[0].tolist(), case.block_tables[0, :3].tolist(), strict=True):
        far_pool[place] = case.kv[block]
    out = dispatch.paged_attention(
        case.q,
        far_pool,
        far,
        case.query_start_loc,
        case.seq_lens,
        scale=64**-0.5,
        max_query_len=query_len,
        max_seq_len=47,
    )
    assert_close(out, want)
    qkv = torch.randn(1, 6 * 64, device="cuda").to(BF16)
    cos, sin = torch.ones(4, 32, device="cuda"), torch.zeros(4, 32, device="cuda")
    slot = torch.tensor([3 * 16 + 5], device="cuda")
    dispatch.rope_kv_write(qkv, torch.tensor([1], device="cuda"), cos, sin, far_pool, slot, num_heads=2)
    assert torch.equal(far_pool[3, :, 5].flatten(), qkv[0, 128:])
    far_pool[0] = torch.randn_like(far_pool[0])
    dispatch.block_copy(far_pool, [0], [3])
    assert torch.equal(far_pool[3], far_pool[0])


def test_last_block_of_a_pool_of_150_000() -> None:
    blocks, layers = 150_000, 2
    if torch.cuda.mem_get_info()[0] < 22 << 30:
        pytest.skip("not enough memory on the card")
    pool = torch.empty((blocks, layers, 2, 16, 8, 128), dtype=BF16, device="cuda")
    case = paged_case([1, 20], [30, 12], dtype=BF16, kv_dtype=BF16, device="cuda", **QWEN3_8B)
    tables = torch.arange(blocks - 1, blocks - 1 - 2 * 4, -1, dtype=torch.int32, device="cuda").view(2, 4)
    layer = kv_view.layer_view(pool, 1)
    for row in range(2):
        for index in range(2):
            layer[int(tables[row, index])] = case.kv[int(case.block_tables[row, index])]
    out = dispatch.paged_attention(
        case.q,
        layer,
        tables,
        case.query_start_loc,
        case.seq_lens,
        scale=128**-0.5,
        max_query_len=20,
        max_seq_len=32,
    )
    assert_close(out, attend(case, "reference"))
    dispatch.block_copy(pool, [blocks - 1], [0])
    assert torch.equal(pool[0].nan_to_num(), pool[-1].nan_to_num())


def capture(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def test_a_graph_follows_lengths_and_contents() -> None:
    """Captured once with bounds, replayed on other batches: each equals the eager result of a fresh case."""
    rows, blocks = 8, 600
    q = torch.zeros(rows, 32, 128, dtype=BF16, device="cuda")
    pool = poisoned(blocks, 1, 2, 16, 8, 128, dtype=BF16, device="cuda")
    tables = torch.zeros(rows, 300, dtype=torch.int32, device="cuda")
    starts = torch.zeros(rows + 1, dtype=torch.int32, device="cuda")
    lens = torch.zeros(rows, dtype=torch.int32, device="cuda")
    logits = torch.zeros(rows, 151_936, device="cuda")
    out, tokens = torch.empty_like(q), torch.empty(rows, dtype=torch.int64, device="cuda")
    hidden = torch.zeros(1, 4096, dtype=BF16, device="cuda")
    plain = torch.randn(4096, 4096, device="cuda").to(BF16) / 64
    weight = dispatch_weights.pack(plain)
    product = torch.empty_like(hidden)
    args = sampling_args(rows, ("top_k", "top_p"), "cuda", 1, 151_936)

    def step() -> None:
        dispatch.paged_attention(
            q,
            kv_view.layer_view(pool, 0),
            tables,
            starts,
            lens,
            scale=128**-0.5,
            max_query_len=1,
            max_seq_len=4800,
            out=out,
        )
        dispatch_logits.sample(logits, out=tokens, **args)
        dispatch.linear(hidden, weight, out=product)

    graph = capture(step)
    for seed, lengths in enumerate([[1], [4000, 1, 17], [5, 300, 900, 16, 15, 1, 2, 700], [4700]]):
        case = paged_case(
            [1] * len(lengths), [length - 1 for length in lengths], dtype=BF16, kv_dtype=BF16, device="cuda", seed=seed,
            **QWEN3_8B,
        )  # fmt: skip
        count = len(lengths)
        q[:count] = case.q
        pool.fill_(float("nan"))
        pool[: case.kv.shape[0], 0] = case.kv
        tables[:count, : case.block_tables.shape[1]] = case.block_tables
        starts.fill_(count)
        starts[: count + 1] = case.query_start_loc
        lens.zero_()
        lens[:count] = case.seq_lens
        logits.normal_()
        hidden.normal_()
        graph.replay()
        assert_close(out[:count], attend(case, "reference"))
        check_draws(logits, tokens, args)
        assert_close(product, dispatch.linear(hidden, dispatch_weights.pack(plain, impl="torch")))
