"""The packed product against the reference: every row count around the tile sizes, ragged widths, dtypes."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus_kernels import dispatch, dispatch_weights, native
from isthmus_kernels.linear.cpu_impl import pack
from isthmus_kernels.linear.reference import linear as reference
from isthmus_kernels.testing import TOLERANCES, poisoned, threads

IMPLS = ["torch", *(["cpu"] if native.available() else [])]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True, params=["fp32", *(["pairs"] if native.multiplies_bf16() else [])])
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bfloat16 rows and weights: both ways, whichever is the faster one here."""
    monkeypatch.setattr(native, "prefers_pairs", lambda: request.param == "pairs")


def check(
    impl: str, m: int, n: int, k: int, dtype: torch.dtype, weight_dtype: torch.dtype, with_bias: bool, seed: int = 0
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k + 5, generator=generator).to(dtype)[:, :k]
    weight = (torch.randn(n, k, generator=generator) / max(k, 1) ** 0.5).to(weight_dtype)
    bias = torch.randn(n, generator=generator).to(weight_dtype) if with_bias else None
    packed = dispatch_weights.pack(weight, bias, dtype=dtype, impl=impl)
    want = reference(x, weight, bias)
    wide = poisoned(m, n + 4, dtype=dtype)
    dispatch.linear(x, packed, out=wide[:, :n])
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(wide[:, :n], want, rtol=rtol, atol=atol)
    assert wide[:, n:].isnan().all(), "columns past the output were written"
    torch.testing.assert_close(dispatch.linear(x, packed), want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("m", [0, *range(1, 14), 17, 24, 25, 31, 64, 97, 200])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_row_counts(impl: str, m: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    if impl == "torch" and dtype != weight_dtype:
        dtype = weight_dtype
    check(impl, m, 80, 100, dtype, weight_dtype, with_bias=True)


@pytest.mark.skipif(not native.available(), reason="needs the compiled library")
@pytest.mark.parametrize("rows", [1023, 1024, 4000])
def test_a_large_weight_is_on_large_pages(rows: int) -> None:
    check("cpu", 1, rows, 1024, torch.bfloat16, torch.bfloat16, with_bias=False)
    packed = pack(torch.randn(rows, 1024).bfloat16(), None, torch.bfloat16)
    assert packed.nbytes >= 2 << 20
    assert packed.panels.data_ptr() % (2 << 20) == 0


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    m=st.integers(1, 60),
    n=st.integers(1, 150),
    k=st.integers(1, 1200),
    dtype=st.sampled_from(DTYPES),
    weight_dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_shape(
    m: int, n: int, k: int, dtype: torch.dtype, weight_dtype: torch.dtype, with_bias: bool, seed: int
) -> None:
    with threads(2):
        for impl in IMPLS:
            if impl == "cpu" or dtype == weight_dtype:
                check(impl, m, n, k, dtype, weight_dtype, with_bias, seed)


@pytest.mark.skipif(not native.available(), reason="the compiled library is not built")
@pytest.mark.parametrize("m", [1, 5, 40])
def test_bf16_weights_lose_nothing(m: int) -> None:
    weight = torch.randn(48, 300).bfloat16()
    x = torch.randn(m, 300)
    narrow = dispatch_weights.pack(weight, dtype=torch.float32, impl="cpu")
    wide = dispatch_weights.pack(weight.float(), impl="cpu")
    assert torch.equal(dispatch.linear(x, narrow), dispatch.linear(x, wide))
    assert 2 * narrow.nbytes == wide.nbytes


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="weight: expected"):
        dispatch_weights.pack(torch.ones(3))
    with pytest.raises(ValueError, match="bias: expected"):
        dispatch_weights.pack(torch.ones(3, 4), torch.ones(4))
    with pytest.raises(ValueError, match="impl: 'gpu'"):
        dispatch_weights.pack(torch.ones(3, 4), impl="gpu")
    if native.available():
        with pytest.raises(ValueError, match=r"x: expected \[T, 4\]"):
            dispatch.linear(torch.ones(2, 5), dispatch_weights.pack(torch.ones(3, 4), impl="cpu"))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("k", [64, 101])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_some_of_the_outputs(impl: str, k: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """They are the whole product's, in its memory."""
    if impl == "torch":
        dtype = weight_dtype
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(150, k, generator=generator).to(weight_dtype)
    bias = torch.randn(150, generator=generator).to(weight_dtype)
    packed = dispatch_weights.pack(weight, bias, dtype=dtype, impl=impl)
    cut = 0
    for first in (0, 16, 32, 64, 96, 100, 128):
        some = packed.outputs_from(first)
        if some is None:
            continue
        cut += 1
        assert (some.out_features, some.in_features) == (150 - first, k)
        for m in (1, 5, 40):
            x = torch.randn(m, k, generator=generator).to(dtype)
            got, want = dispatch.linear(x, some), dispatch.linear(x, packed)[:, first:]
            if impl == "cpu":
                assert torch.equal(got, want)
            torch.testing.assert_close(got, want, rtol=TOLERANCES[dtype][0], atol=TOLERANCES[dtype][1])
    assert cut == 7 if impl == "torch" else cut >= 5


def test_some_of_the_outputs_of_8_bit_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, scale = dispatch_weights.quantize(torch.randn(48, 64, generator=generator), impl="reference")
    packed = dispatch_weights.pack_fp8(weight, scale, torch.randn(48, generator=generator), dtype=torch.bfloat16)
    some = packed.outputs_from(16)
    assert some is not None
    x = torch.randn(3, 64, generator=generator).bfloat16()
    torch.testing.assert_close(dispatch.linear(x, some), dispatch.linear(x, packed)[:, 16:], rtol=1e-2, atol=1e-2)
