"""Products that go on to the residual stream or to the pool: the two ops that define them, and weights that do both."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from isthmus_kernels import dispatch
from isthmus_kernels.dispatch import Heads
from isthmus_kernels.linear.packed import PackedLinear
from isthmus_kernels.testing import assert_close, paged_case, poisoned

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

    def apply_rope_kv_write(self, x: Tensor, qkv: Tensor, heads: Heads) -> bool:
        if self.takes:
            qkv.fill_(7.0)
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
    packed = dispatch.pack(weight)
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
    packed = dispatch.pack(torch.ones(6, 3))
    with pytest.raises(ValueError, match=r"residual, out: expected \[2, 6\], got \(2, 4\) and \(2, 6\)"):
        dispatch.linear_add_rms_norm(
            torch.ones(2, 3), packed, torch.ones(2, 4), torch.ones(6), 1e-5, out=torch.ones(2, 6)
        )


def heads_of(tokens: int, *, kv_heads: int = 2, head_dim: int = 8) -> tuple[Heads, Tensor]:
    """Four query heads, and the pool they belong to, of NaN."""
    case = paged_case(
        [tokens], [5], heads=4, kv_heads=kv_heads, head_dim=head_dim, block_size=8, kv_dtype=torch.float32
    )
    pool = poisoned(*case.pool.shape)
    angles = torch.rand(tokens + 5, head_dim // 2)
    heads = Heads(
        positions=case.positions,
        cos=angles.cos(),
        sin=angles.sin(),
        kv=dispatch.layer_view(pool, 1),
        slot_mapping=case.slot_mapping,
        num_heads=4,
        q_norm=torch.rand(head_dim),
        k_norm=None,
        eps=1e-5,
        scales=None,
    )
    return heads, pool


@pytest.mark.parametrize("queries", [4, 0])
def test_heads_have_the_bits_of_the_two_ops(queries: int) -> None:
    heads, pool = heads_of(11)
    heads = replace(heads, num_heads=queries)
    width = (queries + 4) * 8
    packed, x = dispatch.pack(torch.randn(width, 40) / 6), torch.randn(11, 40)
    want = dispatch.write_heads(dispatch.linear(x, packed), heads)
    written = pool.clone()
    pool.fill_(float("nan"))
    q = dispatch.linear_rope_kv_write(x, packed, heads, qkv=poisoned(11, width))
    assert torch.equal(q, want)
    torch.testing.assert_close(pool, written, rtol=0, atol=0, equal_nan=True)
    assert bool((~written.isnan()).any())


@pytest.mark.parametrize("takes", [True, False])
def test_a_weight_may_write_heads_by_itself(takes: bool) -> None:
    heads, pool = heads_of(3)
    q = dispatch.linear_rope_kv_write(torch.ones(3, 3), joining(takes, 64), heads, qkv=poisoned(3, 64))
    assert q.shape == (3, 4, 8)
    assert bool((q == 7.0).all()) == takes
    assert bool(pool.isnan().all()) == takes


def test_a_product_of_other_heads_is_named() -> None:
    heads, _ = heads_of(2)
    with pytest.raises(ValueError, match=r"qkv: expected \[2, 72\] = \[T, 64\], got \(2, 72\)"):
        dispatch.linear_rope_kv_write(torch.ones(2, 3), dispatch.pack(torch.ones(72, 3)), heads, qkv=torch.ones(2, 72))
