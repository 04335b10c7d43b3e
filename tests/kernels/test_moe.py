"""Mixture of experts in the compiled CPU library: its definition, and a token's result alone and in any batch."""

import pytest
import torch
from kernel_checks import check_moe

from isthmus_kernels import dispatch, native
from isthmus_kernels.testing import threads

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled library is not built")
DTYPES = [torch.float32, torch.bfloat16]
LEVELS = ["base", "avx2", "avx512"]


@pytest.fixture(params=LEVELS[: LEVELS.index(native.level() or "base") + 1])
def instruction_set(request, monkeypatch):
    monkeypatch.setattr(native, "level", lambda: request.param)
    native.entry.cache_clear()
    yield
    native.entry.cache_clear()


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize(
    ("tokens", "count", "top_k", "hidden", "inner"),
    [(0, 4, 2, 32, 16), (1, 8, 3, 64, 48), (9, 5, 2, 70, 41), (40, 3, 1, 33, 130), (130, 16, 4, 64, 32)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_defined(tokens: int, count: int, top_k: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
    check_moe("cpu", "cpu", tokens, count, top_k, hidden, inner, dtype)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clamp", [None, (1.702, 0.8)])
def test_the_same_bits_alone_and_in_any_batch(dtype: torch.dtype, clamp: tuple[float, float] | None) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens, count, top_k, hidden, inner = 70, 6, 3, 50, 37
    x, logits = (torch.randn(tokens, n, generator=generator).to(dtype) for n in (hidden, count))
    gate_up = torch.randn(count, 2 * inner, hidden, generator=generator).to(dtype)
    down = torch.randn(count, hidden, inner, generator=generator).to(dtype)

    def run(rows: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights, experts = dispatch.moe_route(logits[rows], top_k)
        return dispatch.moe(x[rows], weights, experts, gate_up, down, clamp=clamp), weights, experts

    alone = [torch.cat(parts) for parts in zip(*(run(slice(t, t + 1)) for t in range(tokens)), strict=True)]
    for number in (1, 3):
        with threads(number):
            for rows in (slice(0, tokens), slice(3, 12), slice(40, 69)):
                for got, want in zip(run(rows), alone, strict=True):
                    assert torch.equal(got, want[rows])


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("groups", [None, (1, 1), (4, 2), (26, 3)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_every_way_of_routing(
    dtype: torch.dtype, sigmoid: bool, biased: bool, groups: tuple[int, int] | None, renormalize: bool
) -> None:
    """As defined, equal scores included, and the same bits alone and in a batch."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(33, 52, generator=generator).to(dtype)
    logits[5], logits[6, 10:20] = 1.0, 2.5
    bias = torch.randn(52, generator=generator) / 4 if biased else None
    options = {"renormalize": renormalize, "sigmoid": sigmoid, "bias": bias, "groups": groups, "scale": 2.5}
    weights, experts = dispatch.moe_route(logits, 5, impl="cpu", **options)
    want_weights, want_experts = dispatch.moe_route(logits, 5, impl="reference", **options)
    assert torch.equal(experts, want_experts)
    torch.testing.assert_close(weights, want_weights, rtol=1e-5, atol=1e-7)
    alone = [dispatch.moe_route(logits[t : t + 1], 5, impl="cpu", **options) for t in range(33)]
    for got, parts in zip((weights, experts), zip(*alone, strict=True), strict=True):
        assert torch.equal(got, torch.cat(parts))


def test_an_id_that_is_no_expert_is_named() -> None:
    x, weights = torch.ones(2, 8), torch.ones(2, 1)
    experts = torch.tensor([[0], [4]], dtype=torch.int32)
    with pytest.raises(IndexError, match="ids from 0 to 4, and there are 4 experts"):
        dispatch.moe(x, weights, experts, torch.ones(4, 6, 8), torch.ones(4, 8, 3))
