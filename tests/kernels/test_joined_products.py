"""Products that go on to the residual stream: the two ops that define that, and weights that do both."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from isthmus_kernels import dispatch, dispatch_weights
from isthmus_kernels.linear.packed import PackedLinear
from isthmus_kernels.testing import assert_close, poisoned

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


@dataclass(frozen=True)
class Joining:
    """A weight that says whether it took what follows upon itself."""

    takes: bool
    outputs: int
    nbytes: int = 0

    def apply(self, x: Tensor, out: Tensor | None) -> Tensor:
        result = torch.ones(x.shape[0], self.outputs)
        return result if out is None else out.copy_(result)

    def outputs_from(self, first: int) -> None:
        return None

    def apply_add_rms_norm(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float, out: Tensor) -> bool:
        if self.takes:
            residual.fill_(5.0)
            out.fill_(7.0)
        return self.takes


def joining(takes: bool, outputs: int) -> PackedLinear:
    weight = Joining(takes, outputs)
    return PackedLinear(in_features=3, out_features=outputs, weight_dtype=torch.float32, weight=weight)


@pytest.mark.parametrize("with_scratch", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 5, 33])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_sum_has_the_bits_of_the_two_ops(rows: int, with_scratch: bool, dtype: torch.dtype) -> None:
    weight, x = torch.randn(24, 40).to(dtype), torch.randn(rows, 40).to(dtype)
    residual, norm = torch.randn(rows, 24).to(dtype), torch.rand(24).to(dtype)
    packed = dispatch_weights.pack(weight)
    want = residual.clone()
    normed = dispatch.add_rms_norm(dispatch.linear(x, packed), want, norm, 1e-5)
    out = poisoned(rows, 24 + 3, dtype=dtype)[:, :24]
    scratch = poisoned(rows, 24, dtype=dtype) if with_scratch else None
    assert dispatch.linear_add_rms_norm(x, packed, residual, norm, 1e-5, scratch=scratch, out=out) is out
    assert torch.equal(residual, want) and torch.equal(out, normed)


@pytest.mark.parametrize("takes", [True, False])
def test_a_weight_may_add_by_itself(takes: bool) -> None:
    residual, out = torch.zeros(2, 4), poisoned(2, 4)
    dispatch.linear_add_rms_norm(torch.ones(2, 3), joining(takes, 4), residual, torch.ones(4), 0.0, out=out)
    assert_close(residual, torch.full((2, 4), 5.0 if takes else 1.0))
    assert_close(out, torch.full((2, 4), 7.0 if takes else 1.0))


def test_a_residual_that_does_not_match_is_named() -> None:
    packed = dispatch_weights.pack(torch.ones(6, 3))
    with pytest.raises(ValueError, match=r"residual, out: expected \[2, 6\], got \(2, 4\) and \(2, 6\)"):
        dispatch.linear_add_rms_norm(
            torch.ones(2, 3), packed, torch.ones(2, 4), torch.ones(6), 1e-5, out=torch.ones(2, 6)
        )


def test_columns_are_summed_in_parts_where_tiles_leave_half_of_the_device_idle() -> None:
    """As measured on an H200 (runtime/bench/LOG.md)."""
    pytest.importorskip("triton")
    from isthmus_kernels.linear.triton_impl import column_parts  # needs Triton

    shapes = {(rows, columns) for rows in (17, 64, 128, 256) for columns in (4096, 12_288)}
    assert {column_parts(rows, 4096, columns, 132) for rows, columns in shapes} == {2}
    assert {column_parts(rows, 4096, 4096, 132) for rows in (257, 384, 512, 8192)} == {1}
    assert column_parts(256, 5120, 8192, 132) == 1
    assert column_parts(64, 4096, 4095, 132) == 1, "columns that have no halves"
