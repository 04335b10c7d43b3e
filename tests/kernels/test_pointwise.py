"""RMSNorm, its fusion with the residual, the gated activations and the embedding, against their references."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from isthmus_kernels import dispatch, native
from isthmus_kernels.testing import assert_close, poisoned

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled library is not built")

DTYPES = [torch.float32, torch.bfloat16]
GATED = [dispatch.silu_mul, dispatch.gelu_tanh_mul]
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


@pytest.mark.parametrize("op", GATED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gated_activations(op: Callable[..., Tensor], dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = (torch.randn(shape[0], 2 * shape[1]) * 4).to(dtype)
    x[:, :1] = 200.0
    x[:1, -shape[1] - 1 :] = 1.0
    out = poisoned(*shape, dtype=dtype)
    assert_close(op(x, out=out, impl="cpu"), op(x, impl="reference"))


@pytest.mark.parametrize("op", GATED)
def test_gated_activations_of_extreme_gates(op: Callable[..., Tensor]) -> None:
    gates = torch.tensor([[-1e20, -1e4, -200.0, -100.0, -88.0, -7.0, -1.0, 0.0, 1.0, 7.0, 88.0, 1e4, 1e20] * 4])
    x = torch.cat([gates, torch.ones_like(gates)], dim=1)
    assert_close(op(x, impl="cpu"), op(x, impl="reference"))


def test_rms_norm_may_write_over_its_input() -> None:
    x, weight = torch.randn(5, 72), torch.rand(72)
    want = dispatch.rms_norm(x, weight, 1e-5, impl="reference")
    assert_close(dispatch.rms_norm(x, weight, 1e-5, out=x, impl="cpu"), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table_dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 25.25])
def test_embedding(dtype: torch.dtype, table_dtype: torch.dtype, scale: float) -> None:
    table = torch.randn(11, 37).to(table_dtype)
    ids = torch.tensor([10, 0, 0, 7], dtype=torch.int32)
    out = poisoned(4, 40, dtype=dtype)[:, :37]
    got = dispatch.embedding(table, ids, scale=scale, out=out, impl="cpu")
    want = dispatch.embedding(table, ids, scale=scale, out=torch.empty(4, 37, dtype=dtype), impl="reference")
    assert got.data_ptr() == out.data_ptr() and torch.equal(got, want)


@pytest.mark.parametrize("wrong", [-1, 11])
def test_an_id_outside_the_table_writes_nothing(wrong: int) -> None:
    ids, out = torch.tensor([3, wrong], dtype=torch.int32), torch.zeros(2, 4)
    with pytest.raises(IndexError, match=rf"ids\[1\] = {wrong} is outside the table's 11 rows"):
        dispatch.embedding(torch.ones(11, 4), ids, out=out, impl="cpu")
    assert not out.any()


def test_wrong_output_is_named() -> None:
    with pytest.raises(ValueError, match="out: expected"):
        dispatch.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-5, out=torch.ones(2, 7), impl="cpu")
    with pytest.raises(ValueError, match="x: expected"):
        dispatch.silu_mul(torch.ones(2, 7), impl="cpu")
