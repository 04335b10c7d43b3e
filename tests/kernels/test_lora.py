"""Low-rank adapters of rows: every implementation against plain products, and rows without an adapter untouched."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus_kernels import dispatch, native
from isthmus_kernels.device import interpreted
from isthmus_kernels.testing import poisoned

IMPLS = [
    "reference",
    pytest.param("cpu", marks=pytest.mark.skipif(not native.available(), reason="not compiled")),
    pytest.param("triton", marks=pytest.mark.skipif(not interpreted(), reason="Triton is not interpreted")),
]
SHAPES = [
    # inputs, widths of the parts, rank
    (64, (96, 32, 32), 8),
    (72, (48, 48), 16),
    (600, (130,), 4),
    (33, (7, 5, 530), 64),
]


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def case(
    inputs: int, widths: tuple[int, ...], rank: int, rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, tuple[int, ...]]:
    x = randn(rows, inputs, seed=1).to(dtype)
    out = randn(rows, sum(widths), seed=2).to(dtype)
    a = (randn(3, len(widths), rank, inputs, seed=3) / inputs**0.5).to(dtype)
    b = randn(3, rank, sum(widths), seed=4).to(dtype)
    slots = torch.randint(0, 4, (rows,), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
    starts = tuple(sum(widths[:part]) for part in range(len(widths)))
    return x, out, slots, a, b, starts


def spaced(values: Tensor) -> Tensor:
    """The same with NaN between its rows."""
    wide = poisoned(len(values), values.shape[1] + 5, dtype=values.dtype)[:, : values.shape[1]]
    return wide.copy_(values)


def expected(x: Tensor, out: Tensor, slots: Tensor, a: Tensor, b: Tensor, starts: tuple[int, ...]) -> Tensor:
    """Of whole matrices: W x + (A, B) x of each adapter by itself."""
    stops, result = (*starts[1:], out.shape[1]), out.double()
    for slot in range(1, len(a) + 1):
        rows = slots == slot
        for part, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            delta = b[slot - 1, :, start:stop].double().T @ a[slot - 1, part].double()
            result[rows, start:stop] += x[rows].double() @ delta.T
    return result


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_against_whole_matrices(
    impl: str, dtype: torch.dtype, shape: tuple[int, tuple[int, ...], int], rows: int
) -> None:
    x, out, slots, a, b, starts = case(*shape, rows, dtype)
    # Nothing is read or written of rows without an adapter, of slots that are not used, or between rows.
    x, out = spaced(x), spaced(out)
    x[slots == 0] = torch.nan
    before, right = out.clone(), expected(x, out, slots, a, b, starts)
    unused = [slot for slot in range(1, 4) if slot not in slots.tolist()]
    for slot in unused:
        a[slot - 1], b[slot - 1] = torch.nan, torch.nan
    dispatch.lora(x, out, slots, a, b, starts, impl=impl)
    assert torch.equal(out[slots == 0], before[slots == 0])
    tolerance = 2e-4 if dtype == torch.float32 else 6e-2
    torch.testing.assert_close(out[slots > 0].double(), right[slots > 0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_row_has_an_adapter(impl: str) -> None:
    x, out, slots, a, b, starts = case(64, (32, 32), 8, 20, torch.float32)
    before = out.clone()
    a[:], b[:] = torch.nan, torch.nan
    dispatch.lora(x, out, torch.zeros_like(slots), a, b, starts, impl=impl)
    assert torch.equal(out, before)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c.update(starts=(0,)), "a:"),
        (lambda c: c.update(starts=(1, 32)), "a:"),
        (lambda c: c.update(b=c["b"][:, :4]), "b:"),
        (lambda c: c.update(x=c["x"].double()), "x:"),
        (lambda c: c.update(out=c["out"].T.contiguous().T), "out:"),
        (lambda c: c.update(slots=c["slots"].long()), "slots:"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: Callable[[dict[str, Any]], None], named: str) -> None:
    names = ("x", "out", "slots", "a", "b", "starts")
    arguments: dict[str, Any] = dict(zip(names, case(64, (32, 32), 8, 20, torch.float32), strict=True))
    change(arguments)
    with pytest.raises(ValueError, match=named):
        dispatch.lora(**arguments)
