"""On a card that is switched to it, a row's result is the same bits alone and in any batch, in any chunk."""

from collections.abc import Iterator

import pytest
import torch
from invariance_checks import check_attention, check_experts, check_linear, check_lora, check_sampling

from isthmus_kernels import batch_invariance
from isthmus_kernels.linear import triton_invariant

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def alike() -> Iterator[None]:
    torch.manual_seed(11)
    device = torch.device("cuda", torch.cuda.current_device())
    batch_invariance.switch(device, True)
    yield
    batch_invariance.switch(device, False)


@pytest.mark.parametrize(("outputs", "columns"), [(6144, 4096), (4096, 12288), (1000, 328), (4096, 4096)])
def test_linear(outputs: int, columns: int) -> None:
    check_linear("cuda", BF16, outputs, columns, batches=[1, 2, 16, 17, 63, 64, 65, 128, 500, 2000])


@pytest.mark.parametrize(("inputs", "widths"), [(4096, (4096, 1024, 1024)), (12288, (4096,)), (600, (40, 8))])
def test_lora(inputs: int, widths: tuple[int, ...]) -> None:
    check_lora("cuda", BF16, rows=1100, inputs=inputs, widths=widths)


@pytest.mark.parametrize("rows", [1, 64, 130, 2000])
def test_every_tile_gives_the_same_bits(rows: int) -> None:
    x, weight = (torch.randn(n, 4096).to("cuda", BF16) for n in (rows, 6144))
    results = []
    for tile in (triton_invariant.FEW, triton_invariant.MANY):
        out = torch.full((rows, 6144), float("nan"), device="cuda", dtype=BF16)
        triton_invariant.multiply(x, weight, None, out, tile)
        results.append(out)
    assert torch.equal(*results)
    torch.testing.assert_close(results[0], x @ weight.T, rtol=2e-2, atol=0.5)


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("block_size", [16, 64])
def test_attention(window: int | None, block_size: int) -> None:
    shape = {"heads": 32, "kv_heads": 8, "head_dim": 128, "block_size": block_size}
    check_attention("cuda", BF16, lengths=[1, 70, 333, 2100], window=window, **shape)


@pytest.mark.parametrize(("count", "top_k"), [(8, 2), (128, 8)])
def test_experts(count: int, top_k: int) -> None:
    check_experts("cuda", BF16, tokens=600, count=count, top_k=top_k, hidden=2048, inner=768)


def test_sampling() -> None:
    check_sampling("cuda", rows=70, vocab=151_936)
