"""The CUDA product kernel on a card: against fp32, between poisoned memory, past 2^32 elements, inside a graph."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from isthmus_kernels import dispatch, dispatch_weights
from isthmus_kernels.linear import cuda_impl
from isthmus_kernels.testing import assert_close, poisoned

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_kernels")]

BF16 = torch.bfloat16


def noise(rows: int, columns: int, scale: float = 1.0) -> Tensor:
    """A matrix between NaN on all sides."""
    wide = poisoned(rows + 2, columns + 16, dtype=BF16, device="cuda")
    inner = wide[1:-1, 8:-8]
    inner.copy_(torch.randn(rows, columns, device="cuda") * scale)
    return inner


def definition(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = (x.float() @ weight.float().T).chunk(2, dim=1)
    return functional.silu(gate) * up


@pytest.mark.parametrize("tile", [128, 96])
@pytest.mark.parametrize(
    ("rows", "width", "columns"),
    [
        (256, 128, 64),
        (256, 12_288, 4096),
        (1, 8, 64),
        (17, 264, 128),
        (127, 8, 640),
        (129, 136, 192),
        (257, 1000, 4096),
        (300, 520, 448),
        (1000, 3072, 4096),
        (2049, 2056, 1024),
        (4096, 4096, 12_288),
        (777, 12_288, 4096),
        (70_000, 256, 128),
        (5000, 3000, 64),
    ],
)
def test_shapes(rows: int, width: int, columns: int, tile: int) -> None:
    x, weight = noise(rows, columns), noise(2 * width, columns, columns**-0.5)
    wide = poisoned(rows + 2, width + 16, dtype=BF16, device="cuda")
    out = wide[1:-1, 8:-8]
    cuda_impl.gated_product(x, weight, out, tile)
    assert_close(out, definition(x, weight))
    out.fill_(float("nan"))
    assert wide.isnan().all(), "written outside of the result"


def test_bits_of_a_row_do_not_depend_on_the_others_or_the_tile() -> None:
    x, weight = noise(3000, 1024), noise(2048, 1024, 1 / 32)
    whole = poisoned(3000, 1024, dtype=BF16, device="cuda")
    cuda_impl.gated_product(x, weight, whole)
    for first in (0, 1, 1700, 2999):
        for tile in (128, 96):
            part = poisoned(3000 - first, 1024, dtype=BF16, device="cuda")
            cuda_impl.gated_product(x[first:].clone(), weight, part, tile)
            assert torch.equal(part, whole[first:])


def test_gates_far_from_zero() -> None:
    x = torch.zeros(256, 64, dtype=BF16, device="cuda")
    x[:, 0] = torch.linspace(-300, 300, 256)
    weight = torch.zeros(512, 64, dtype=BF16, device="cuda")
    weight[:256, 0] = 1
    weight[256:, 1] = 1
    x[:, 1] = 0.5
    out = poisoned(256, 256, dtype=BF16, device="cuda")
    cuda_impl.gated_product(x, weight, out)
    assert_close(out, definition(x, weight))


def test_elements_past_two_to_the_32nd() -> None:
    rows, columns, width = 270_000, 16_384, 16
    x = torch.zeros(rows, columns, dtype=BF16, device="cuda")
    weight = noise(2 * width, columns, columns**-0.5)
    x[-300:] = torch.randn(300, columns, device="cuda")
    out = poisoned(rows, width, dtype=BF16, device="cuda")
    cuda_impl.gated_product(x, weight, out)
    assert_close(out[-300:], definition(x[-300:], weight))
    assert not out[:-300].any()


def test_a_graph_replays_it() -> None:
    x, weight = noise(1500, 512), noise(1024, 512, 1 / 16)
    out = poisoned(1500, 512, dtype=BF16, device="cuda")
    cuda_impl.gated_product(x, weight, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda_impl.gated_product(x, weight, out)
    x.copy_(torch.randn_like(x))
    out.fill_(float("nan"))
    graph.replay()
    assert_close(out, definition(x, weight))


@pytest.mark.parametrize("rows", [5, 200, 1024, 4000])
@pytest.mark.parametrize("with_bias", [False, True])
def test_dispatch_takes_any_number_of_rows(rows: int, with_bias: bool) -> None:
    x, weight = noise(rows, 512), noise(4096, 512, 1 / 16)
    bias = torch.randn(4096, device="cuda").to(BF16) if with_bias else None
    out = poisoned(rows, 2048, dtype=BF16, device="cuda")
    dispatch.linear_silu_mul(x, dispatch_weights.pack(weight, bias), out=out)
    product = x.float() @ weight.float().T + (0 if bias is None else bias.float())
    gate, up = product.chunk(2, dim=1)
    # The two ops round each half to bf16 before they are multiplied.
    torch.testing.assert_close(out.float(), functional.silu(gate) * up, rtol=3e-2, atol=2e-2)
