"""RMSNorm, its fusion with the residual, and the gated SiLU, against their references."""

import pytest
import torch

from isthmus_kernels import dispatch, native
from isthmus_kernels.testing import assert_close, poisoned

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled library is not built")

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(0, 64), (1, 1), (1, 576), (3, 37), (5, 64), (70, 576), (33, 1000), (2, 4096)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(dtype: torch.dtype, weight_dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = (torch.randn(shape[0], shape[1] + 3) * 5).to(dtype)[:, : shape[1]]
    weight = torch.rand(shape[1]).to(weight_dtype)
    out = poisoned(*shape, dtype=dtype)
    got = dispatch.rms_norm(x, weight, 1e-5, out=out, impl="cpu")
    assert got.data_ptr() == out.data_ptr()
    assert_close(got, dispatch.rms_norm(x, weight, 1e-5, impl="reference"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_and_output_over_input(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.rand(shape[1])
    want_residual = residual.clone()
    want = dispatch.add_rms_norm(x, want_residual, weight, 1e-5, impl="reference")
    got = dispatch.add_rms_norm(x, residual, weight, 1e-5, out=x, impl="cpu")
    assert torch.equal(residual, want_residual)
    assert_close(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_silu_mul(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = (torch.randn(shape[0], 2 * shape[1]) * 4).to(dtype)
    x[:, :1] = 200.0
    x[:1, -shape[1] - 1 :] = 1.0
    out = poisoned(*shape, dtype=dtype)
    assert_close(dispatch.silu_mul(x, out=out, impl="cpu"), dispatch.silu_mul(x, impl="reference"))


def test_silu_mul_of_extreme_gates() -> None:
    gates = torch.tensor([[-1e4, -200.0, -100.0, -88.0, -1.0, 0.0, 1.0, 88.0, 1e4] * 4])
    x = torch.cat([gates, torch.ones_like(gates)], dim=1)
    assert_close(dispatch.silu_mul(x, impl="cpu"), dispatch.silu_mul(x, impl="reference"))


def test_wrong_output_is_named() -> None:
    with pytest.raises(ValueError, match="out: expected"):
        dispatch.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-5, out=torch.ones(2, 7), impl="cpu")
    with pytest.raises(ValueError, match="x: expected"):
        dispatch.silu_mul(torch.ones(2, 7), impl="cpu")
