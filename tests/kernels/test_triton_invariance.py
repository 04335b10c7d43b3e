"""On a device that is switched to it, a row's result is the same bits alone and in any batch, in any chunk.

In Triton's interpreter here, where one product stands for the tensor cores' instructions; on a card by
tests/gpu/test_batch_invariance.py, with the same checks.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from invariance_checks import check_attention, check_experts, check_linear, check_lora, check_sampling

from isthmus_kernels import batch_invariance
from isthmus_kernels.device import interpreted
from isthmus_kernels.linear import cuda_impl
from isthmus_kernels.linear.triton_invariant import FEW, MANY, multiply, tile_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not interpreted(), reason="kernels are compiled here: tests/gpu has these checks"),
]

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def alike(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """NumPy orders the sums of a product by its shape, tensor cores do not: here they are summed in 64 bits."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder

    def create_dot(self: Any, a: Any, b: Any, acc: Any, *rest: Any) -> Any:
        factors = [x if x.dtype.scalar == tl.float32 else self.cast_impl(x, tl.float32) for x in (a, b)]
        product = np.matmul(*(x.data for x in factors), dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + acc.data, tl.float32)

    monkeypatch.setattr(builder, "create_dot", create_dot)
    torch.manual_seed(11)
    batch_invariance.switch(CPU, True)
    yield
    batch_invariance.switch(CPU, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(dtype: torch.dtype) -> None:
    check_linear("cpu", dtype, 70, 200, batches=[1, 17, 70])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora(dtype: torch.dtype) -> None:
    check_lora("cpu", dtype, rows=1100, inputs=600, widths=(40, 8))


def test_every_tile_gives_the_same_bits() -> None:
    x, weight = (torch.randn(n, 100).bfloat16() for n in (70, 140))
    results = [torch.full((70, 140), float("nan"), dtype=torch.bfloat16) for _ in range(2)]
    for tile, out in zip((FEW, MANY), results, strict=True):
        multiply(x, weight, None, out, tile)
    assert torch.equal(*results)


def test_both_tiles_are_used() -> None:
    assert tile_for(1, torch.bfloat16) is tile_for(64, torch.bfloat16) is FEW
    assert tile_for(65, torch.bfloat16) is MANY


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(dtype: torch.dtype, window: int | None) -> None:
    check_attention("cpu", dtype, lengths=[1, 66, 20], window=window, heads=6, kv_heads=2, head_dim=20, block_size=16)


def test_experts() -> None:
    check_experts("cpu", torch.bfloat16, tokens=40, count=3, top_k=2, hidden=64, inner=32)


def test_sampling() -> None:
    check_sampling("cpu", rows=7, vocab=9000)


def test_a_switch_is_for_one_device() -> None:
    assert not batch_invariance.required(torch.device("cuda", 0))
    batch_invariance.switch(CPU, False)
    assert not batch_invariance.required(CPU)


def test_the_gated_product_of_many_rows_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def gated_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tile: int) -> None:
        out.zero_()

    monkeypatch.setattr(cuda_impl, "use", lambda *_: 1.0)
    monkeypatch.setattr(cuda_impl, "refusal", lambda *_: None)
    monkeypatch.setattr(cuda_impl, "gated_product", gated_product)
    weight = cuda_impl.pack(torch.ones(32, 8), None, torch.float32)
    x, out = torch.ones(4, 8), torch.empty(4, 16)
    assert not weight.apply_silu_mul(x, out)
    batch_invariance.switch(CPU, False)
    assert weight.apply_silu_mul(x, out)
