"""Products that are added to the residual stream as they are made, on a card: against fp32, between poisoned memory."""

import pytest
import torch
from torch import Tensor

from isthmus_kernels import dispatch, dispatch_weights
from isthmus_kernels.device import multiprocessors
from isthmus_kernels.linear.triton_impl import column_parts
from isthmus_kernels.testing import assert_close, poisoned

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


def noise(rows: int, columns: int, scale: float = 1.0) -> Tensor:
    """A matrix between NaN on all sides."""
    wide = poisoned(rows + 2, columns + 16, dtype=BF16, device="cuda")
    inner = wide[1:-1, 8:-8]
    inner.copy_(torch.randn(rows, columns, device="cuda") * scale)
    return inner


@pytest.mark.parametrize("rows", [17, 64, 256, 300, 2048])
@pytest.mark.parametrize(("outputs", "columns"), [(4096, 4096), (4096, 12_288), (2048, 768)])
def test_products_that_are_added(rows: int, outputs: int, columns: int) -> None:
    x, weight = noise(rows, columns), noise(outputs, columns, columns**-0.5).contiguous()
    residual, norm = noise(rows, outputs), (torch.rand(outputs, device="cuda") + 0.5).to(BF16)
    want = residual.float() + x.float() @ weight.float().T
    out = poisoned(rows, outputs, dtype=BF16, device="cuda")
    scratch = poisoned(rows, outputs, dtype=BF16, device="cuda")
    dispatch.linear_add_rms_norm(x, dispatch_weights.pack(weight), residual, norm, 1e-6, scratch=scratch, out=out)
    assert scratch.isnan().all(), "nothing is between product and addition"
    assert_close(residual, want)
    assert_close(out, dispatch.rms_norm(residual, norm, 1e-6, impl="reference"))


def test_few_rows_are_summed_in_parts_and_replayed() -> None:
    rows, outputs, columns = 256, 4096, 12_288
    x, packed = noise(rows, columns), dispatch_weights.pack(noise(outputs, columns, columns**-0.5).contiguous())
    assert column_parts(rows, outputs, columns, multiprocessors(x.device)) == 2
    begin, norm = noise(rows, outputs), torch.ones(outputs, device="cuda", dtype=BF16)
    residual, out = begin.clone(), poisoned(rows, outputs, dtype=BF16, device="cuda")
    dispatch.linear_add_rms_norm(x, packed, residual, norm, 1e-6, out=out)
    want, want_out = residual.clone(), out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dispatch.linear_add_rms_norm(x, packed, residual, norm, 1e-6, out=out)
    residual.copy_(begin)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(residual, want) and torch.equal(out, want_out)
