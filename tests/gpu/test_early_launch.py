"""Products that begin while the kernel before them still runs read what it wrote, and not what was there."""

from collections.abc import Iterator

import pytest
import torch

from isthmus_kernels import dispatch, dispatch_weights, early_launch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_kernels")]


@pytest.fixture(autouse=True)
def early() -> Iterator[None]:
    device = torch.device("cuda", torch.cuda.current_device())
    yield
    early_launch.switch(device, False)


@pytest.mark.parametrize(("columns", "inner"), [(5120, 4096), (4096, 12_288), (1000, 2048)])
def test_same_bits_as_one_after_the_other(columns: int, inner: int) -> None:
    """A chain whose buffers are used again at once, replayed with another input each time."""
    torch.manual_seed(5)
    device = torch.device("cuda", torch.cuda.current_device())

    def some(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device=device) * shape[-1] ** -0.5).bfloat16()

    layers = [
        [dispatch_weights.pack(some(*shape)) for shape in ((2 * inner, columns), (columns, inner))] for _ in range(4)
    ]
    norm, inputs = some(columns) + 1, some(40, columns) * columns**0.5
    x, residual, wide, half = (
        torch.empty(1, width, device=device, dtype=torch.bfloat16) for width in (columns, columns, 2 * inner, inner)
    )

    def step() -> None:
        dispatch.rms_norm(residual, norm, 1e-6, out=x)
        for up, down in layers:
            dispatch.linear(x, up, out=wide)
            dispatch.silu_mul(wide, out=half)
            dispatch.linear(half, down, out=x)
            dispatch.add_rms_norm(x, residual, norm, 1e-6, out=x)
            dispatch.linear(x, up, out=wide)
            dispatch.linear(wide[:, :inner], down, out=x)

    found = []
    for on in (False, True):
        early_launch.switch(device, on)
        torch.cuda.synchronize()
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        results = []
        for row in inputs:
            for buffer in (x, wide, half):
                buffer.fill_(float("nan"))
            residual.copy_(row[None])
            graph.replay()
            results.append(torch.cat([x, residual, wide], dim=1))
        found.append(torch.cat(results))
    assert found[0].isfinite().all()
    assert torch.equal(found[0].view(torch.int16), found[1].view(torch.int16))
