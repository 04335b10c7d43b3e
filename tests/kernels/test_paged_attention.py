"""Every implementation of paged attention against the reference, over poisoned memory."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import check_attention

from isthmus_kernels import dispatch, kv_view, native
from isthmus_kernels.testing import PagedCase, assert_close, paged_case, poisoned, threads

IMPLS = ["torch", *(["cpu"] if native.available() else [])]
DTYPES = [torch.float32, torch.bfloat16]
FP8 = torch.float8_e4m3fn
KV_DTYPES = [*DTYPES, FP8]


def attend(case: PagedCase, impl: str, window: int | None = None) -> torch.Tensor:
    out = poisoned(*case.q.shape, dtype=case.q.dtype)
    returned = dispatch.paged_attention(
        case.q,
        case.kv,
        case.block_tables,
        case.query_start_loc,
        case.seq_lens,
        scale=case.q.shape[2] ** -0.5,
        max_query_len=case.max_query_len,
        max_seq_len=case.max_seq_len,
        window=window,
        scales=case.scales,
        out=out,
        impl=impl,
    )
    assert returned.data_ptr() == out.data_ptr()
    assert out[case.tokens :].isnan().all(), "rows past the batch were written"
    return out[: case.tokens]


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 64])
@pytest.mark.parametrize("head_dim", [20, 32, 64, 72, 80, 96, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_shapes(block_size: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    case = paged_case(
        [1, 40, 1, 7],
        [200, 0, 0, 70],
        heads=9,
        kv_heads=3,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        spare_tokens=2,
    )
    want = attend(case, "reference")
    for impl in IMPLS:
        assert_close(attend(case, impl), want)


@pytest.mark.parametrize("group", [*range(1, 9), 70])
@pytest.mark.parametrize("window", [None, 1, 3, 33, 100])
def test_groups_and_windows(group: int, window: int | None) -> None:
    case = paged_case(
        [1, 70, 3, 1], [150, 30, 64, 0], heads=2 * group, kv_heads=2, head_dim=64, block_size=16, seed=group
    )
    want = attend(case, "reference", window)
    for impl in IMPLS:
        assert_close(attend(case, impl, window), want)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("softcap", "sinks"), [(2.0, False), (50.0, False), (None, True), (3.0, True)])
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("dtype", DTYPES)
def test_soft_cap_and_sinks(
    impl: str, softcap: float | None, sinks: bool, window: int | None, dtype: torch.dtype
) -> None:
    """Decode and prefill rows, contexts in one part and in several."""
    shape = {"heads": 6, "kv_heads": 2, "head_dim": 48, "block_size": 16, "dtype": dtype}
    lens = [1, 40, 1, 7], [900, 20, 0, 300]
    for kv_dtype in (torch.float32, FP8):
        shape["kv_dtype"] = kv_dtype
        check_attention(impl, "cpu", *lens, window=window, softcap=softcap, sinks=sinks, **shape)


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
@pytest.mark.parametrize("queries", [1, 30])
def test_every_8_bit_float_is_read_as_it_is(impl: str, queries: int) -> None:
    """One key weighs 1: what comes out is its value. 0x7f and 0xff are NaN."""
    case = paged_case([queries], [0], heads=1, kv_heads=1, head_dim=256, block_size=32, kv_dtype=FP8)
    assert case.scales is not None
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    block = int(case.block_tables[0, 0])
    case.kv[block, 0, :queries], case.kv[block, 1, :queries] = torch.zeros(256).to(FP8), codes
    case.scales[block, 0, :queries], case.scales[block, 1, :queries] = 1.0, 0.375
    got = attend(case, impl)[0, 0]
    assert torch.equal(got.isnan(), codes.isnan()) and int(got.isnan().sum()) == 2
    assert torch.equal(got.nan_to_num(), (codes.float() * 0.375).nan_to_num())


def test_scales_go_with_8_bit_floats_and_with_nothing_else() -> None:
    case = paged_case([1], [3], heads=1, kv_heads=1, head_dim=16, block_size=8, kv_dtype=FP8)
    args = (case.block_tables, case.query_start_loc, case.seq_lens)
    bounds = {"scale": 1.0, "max_query_len": 1, "max_seq_len": 4}
    assert case.scales is not None
    for kv, scales in ((case.kv, None), (case.kv.float(), case.scales), (case.kv, case.scales.bfloat16())):
        with pytest.raises(ValueError, match=r"^scales: "):
            dispatch.paged_attention(case.q, kv, *args, scales=scales, **bounds)


@pytest.mark.parametrize("impl", IMPLS)
def test_wide_heads(impl: str) -> None:
    """As latent attention has them."""
    check_attention(impl, "cpu", [1, 20], [200, 10], heads=16, kv_heads=1, head_dim=576, block_size=16)


@settings(max_examples=60)
@given(
    lens=st.lists(st.tuples(st.sampled_from([0, 1, 1, 2, 15, 17, 65]), st.integers(0, 300)), min_size=1, max_size=6),
    kv_heads=st.integers(1, 5),
    group=st.integers(1, 8),
    head_dim=st.sampled_from([7, 32, 64, 72, 80, 96, 128]),
    block_size=st.sampled_from([1, 8, 16, 32, 64]),
    dtype=st.sampled_from(DTYPES),
    kv_dtype=st.sampled_from(KV_DTYPES),
    window=st.none() | st.integers(1, 400),
    layout=st.sampled_from(["block-major", "layer-major"]),
    seed=st.integers(0, 2**31),
)
@pytest.mark.slow
def test_any_batch(
    lens: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    window: int | None,
    layout: kv_view.Layout,
    seed: int,
) -> None:
    case = paged_case(
        [query for query, _ in lens],
        [context for _, context in lens],
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        layout=layout,
        spare_tokens=1,
        seed=seed,
    )
    want = attend(case, "reference", window)
    with threads(2):
        for impl in IMPLS:
            assert_close(attend(case, impl, window), want)


@pytest.mark.parametrize("impl", IMPLS)
def test_values_of_one_give_one(impl: str) -> None:
    case = paged_case([1, 50], [333, 20], heads=6, kv_heads=2, head_dim=64, block_size=16)
    case.kv[:, 1] = torch.where(case.kv[:, 1].isnan(), float("nan"), 1.0)
    torch.testing.assert_close(attend(case, impl), torch.ones_like(case.q), rtol=1e-6, atol=0)


@pytest.mark.parametrize("impl", IMPLS)
def test_large_scores_do_not_overflow(impl: str) -> None:
    case = paged_case([1, 20], [100, 100], heads=4, kv_heads=2, head_dim=64, block_size=16)
    case.q.mul_(300)
    # Scores of thousands are rounded to 1e-4 already.
    torch.testing.assert_close(attend(case, impl), attend(case, "reference"), rtol=1e-3, atol=5e-4)


@pytest.mark.parametrize("impl", IMPLS)
def test_queries_inside_a_fused_projection(impl: str) -> None:
    case = paged_case([1, 20], [100, 0], heads=4, kv_heads=2, head_dim=32, block_size=16)
    fused = poisoned(case.tokens, 8 * 32)
    view = fused[:, : 4 * 32].view(case.tokens, 4, 32)
    view.copy_(case.q)
    got = dispatch.paged_attention(
        view,
        case.kv,
        case.block_tables,
        case.query_start_loc,
        case.seq_lens,
        scale=32**-0.5,
        max_query_len=20,
        max_seq_len=101,
        impl=impl,
    )
    assert_close(got, attend(case, "reference"))


@pytest.mark.skipif(not native.available(), reason="the compiled library is not built")
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("query_len", [1, 2, 30])
def test_partitions_of_a_long_context_merge(count: int, query_len: int) -> None:
    case = paged_case([query_len], [5000], heads=8, kv_heads=2, head_dim=64, block_size=16)
    with threads(count):
        got = attend(case, "cpu")
    assert_close(got, attend(case, "reference"))


@pytest.mark.skipif(not native.available(), reason="the compiled library is not built")
def test_block_outside_the_pool_is_named() -> None:
    case = paged_case([1, 1], [20, 20], heads=2, kv_heads=1, head_dim=32, block_size=16)
    case.block_tables[1, 1] = case.kv.shape[0]
    with pytest.raises(IndexError, match=r"block_tables\[1\]"):
        attend(case, "cpu")


def test_wrong_shapes_are_named() -> None:
    case = paged_case([1], [20], heads=3, kv_heads=2, head_dim=32, block_size=16)
    with pytest.raises(ValueError, match="q: 3 heads"):
        attend(case, "torch")
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"softcap": 0.0}, "softcap: 0.0 is not above 0"),
        ({"sinks": torch.zeros(3)}, r"sinks: expected contiguous fp32 \[2\]"),
    )
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            dispatch.paged_attention(
                case.q[:, :2],
                case.kv,
                case.block_tables,
                case.query_start_loc,
                case.seq_lens,
                scale=1.0,
                max_query_len=1,
                max_seq_len=21,
                **options,
            )
    with pytest.raises(ValueError, match="slot: 9"):
        kv_view.layer_view(case.pool, 9)
