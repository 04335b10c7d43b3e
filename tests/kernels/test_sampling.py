"""Sampling: implementations agree exactly, filters hold, noise is reproducible and has the right law."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_kernels import dispatch_logits, native
from isthmus_kernels.device import interpreted
from isthmus_kernels.sampling.noise import gumbel, uniform

FAST = ["torch", *(["cpu"] if native.available() else [])]


def batch(rows: int, **given_args: float) -> dict[str, Any]:
    args: dict[str, Any] = {
        "temperature": torch.ones(rows),
        "seeds": torch.arange(rows),
        "positions": torch.zeros(rows, dtype=torch.int64),
    }
    for name, value in given_args.items():
        args[name] = torch.full((rows,), value, dtype=torch.int32 if name == "top_k" else torch.float32)
    return args


@settings(max_examples=100)
@given(
    vocab=st.sampled_from([1, 2, 17, 100, 257]),
    coarse=st.booleans(),
    holes=st.booleans(),
    filters=st.sets(st.sampled_from(["top_k", "top_p", "min_p"])),
    seed=st.integers(0, 2**31),
)
def test_implementations_agree(vocab: int, coarse: bool, holes: bool, filters: set[str], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, vocab, generator=generator) * 3
    if coarse:
        logits = logits.round()  # ties
    if holes:
        logits[:, 1::3] = float("-inf")
    args: dict[str, Any] = {
        "temperature": torch.tensor([0.0, 0.5, 1.0, 1.5, 0.1, 1.0]),
        "seeds": torch.randint(-(2**62), 2**62, (6,), generator=generator),
        "positions": torch.randint(0, 100_000, (6,), generator=generator),
        "top_k": torch.tensor([0, 1, 5, -1, vocab, vocab + 5], dtype=torch.int32),
        "top_p": torch.tensor([0.5, 0.9, 1.0, 0.3, 0.99, 0.0]),
        "min_p": torch.tensor([0.0, 0.1, 0.5, 0.0, 0.01, 1.0]),
    }
    for name in ("top_k", "top_p", "min_p"):
        if name not in filters:
            del args[name]
    want = dispatch_logits.sample(logits, impl="reference", **args).tolist()
    for impl in FAST:
        assert dispatch_logits.sample(logits, impl=impl, **args).tolist() == want


# Finite positive temperatures, from the smallest number there is: below 2^-126 they are subnormal.
TEMPERATURES = [2.0**-149, 2.0**-140, 1e-40, 2.0**-126, 1e-37, 1e-30, 1e-20, 1e-6, 0.1, 1.0, 1e4, 1e30, 3.4e38]


@pytest.mark.slow
@settings(max_examples=25)
@given(
    temperatures=st.lists(
        st.sampled_from(TEMPERATURES) | st.floats(2.0**-149, 2.0**127, width=32, allow_subnormal=True),
        min_size=1,
        max_size=4,
    ),
    shift=st.sampled_from([0.0, 5.0, -50.0, 1e-36, 1e30]),
    filters=st.sets(st.sampled_from(["top_k", "top_p", "min_p"])),
    holes=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_temperature(temperatures: list[float], shift: float, filters: set[str], holes: bool, seed: int) -> None:
    rows = len(temperatures)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 101, generator=generator) * 3 + shift
    if holes:
        logits[:, 1::3] = float("-inf")
    args = batch(rows, **{name: {"top_k": 7, "top_p": 0.9, "min_p": 0.05}[name] for name in filters})
    args["temperature"] = torch.tensor(temperatures)
    args["seeds"] = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    impls = ["reference", *FAST, *(["triton"] if interpreted() else [])]
    drawn = {impl: dispatch_logits.sample(logits, impl=impl, **args).tolist() for impl in impls}
    assert len({tuple(tokens) for tokens in drawn.values()}) == 1, drawn
    for row, temperature in enumerate(temperatures):
        best, second = logits[row].topk(2).values.double().tolist()
        # The noise of two tokens differs by less than 20.
        if (best - second) / temperature > 20:
            assert drawn["reference"][row] == logits[row].argmax()


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("temperature", TEMPERATURES[:6])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_cold_row_is_greedy(impl: str, temperature: float, sign: float) -> None:
    logits = sign * torch.tensor([[3.0, 1.0, 5.0, 4.0, 2.0]])
    args = batch(1, top_p=0.5) | {"temperature": torch.tensor([temperature])}
    assert dispatch_logits.sample(logits, impl=impl, **args).item() == logits.argmax()


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0, float("inf")])
def test_a_row_of_no_numbers_draws_some_token(impl: str, value: float, temperature: float) -> None:
    logits = torch.full((1, 7), value)
    args = batch(1, top_k=3, top_p=0.5, min_p=0.1) | {"temperature": torch.tensor([temperature])}
    assert 0 <= dispatch_logits.sample(logits, impl=impl, **args).item() < 7
    logits[0, 5] = 1.0
    if value == float("-inf"):
        assert dispatch_logits.sample(logits, impl=impl, **args).item() == 5


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_greedy_takes_the_first_of_equals(impl: str) -> None:
    logits = torch.zeros(3, 40)
    logits[1, 7] = logits[1, 9] = 2.0
    logits[2] = float("-inf")
    out = torch.full((3,), -1)
    assert dispatch_logits.sample(logits, out=out, impl=impl).tolist() == [0, 7, 0]
    assert out.tolist() == [0, 7, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_over_a_large_vocabulary(dtype: torch.dtype, rows: int) -> None:
    """More ids than one task of the compiled library looks at, with equals in several and a part of no numbers."""
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, 50_001, generator=generator).clamp(max=3.0).to(dtype)
    for at, ties in enumerate(((50_000,), (16_383, 16_384, 49_999), (33_000, 40_000))[:rows]):
        logits[at, list(ties)] = 7.0
    want = [50_000, 16_383, 33_000][:rows]
    for impl in ("reference", *FAST):
        assert dispatch_logits.sample(logits, impl=impl).tolist() == want, impl
    assert dispatch_logits.sample(torch.full((rows, 50_001), float("-inf"), dtype=dtype)).tolist() == [0] * rows
    logits[:, :16_384] = float("nan")
    if native.available():
        assert dispatch_logits.sample(logits, impl="cpu").tolist() == [50_000, 16_384, 33_000][:rows]


@pytest.mark.skipif(not native.available(), reason="needs the compiled library")
def test_bfloat16_logits_are_read_as_they_are() -> None:
    """A converted copy would be PyTorch's work, on threads that fight with the library's for the processors."""
    logits = torch.randn(4, 300).bfloat16()
    args = batch(4, top_p=0.9, top_k=40)
    assert torch.equal(
        dispatch_logits.sample(logits, impl="cpu", **args), dispatch_logits.sample(logits.float(), impl="cpu", **args)
    )
    out = torch.empty(4, dtype=torch.int64)
    with native.record() as program:
        dispatch_logits.sample(logits, impl="cpu", out=out)
    logits.neg_()
    program.run()
    assert out.tolist() == logits.float().argmax(dim=1).tolist()


@pytest.mark.parametrize("impl", FAST)
def test_a_request_does_not_feel_its_batch(impl: str) -> None:
    logits = torch.randn(8, 500)
    args = batch(8, top_p=0.9)
    args["positions"] = torch.arange(8) * 3
    together = dispatch_logits.sample(logits, impl=impl, **args)
    for row in range(8):
        alone = {name: value[row : row + 1] for name, value in args.items()}
        assert dispatch_logits.sample(logits[row : row + 1], impl=impl, **alone).item() == together[row].item()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    shuffled = dispatch_logits.sample(logits[order], impl=impl, **{name: value[order] for name, value in args.items()})
    assert torch.equal(shuffled, together[order])


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize(
    ("filters", "kept"),
    [({}, 8), ({"top_k": 3}, 3), ({"top_p": 0.6}, None), ({"min_p": 0.3}, None), ({"top_k": 5, "top_p": 0.7}, None)],
)
def test_distribution(impl: str, filters: dict[str, float], kept: int | None) -> None:
    logits = torch.tensor([1.5, 0.2, -1.0, 2.0, 0.9, -0.3, 1.1, -2.5])
    probs = logits.double().softmax(0)
    order = probs.argsort(descending=True)
    keep = torch.ones(8, dtype=torch.bool)
    if "top_k" in filters:
        keep[order[int(filters["top_k"]) :]] = False
    if "min_p" in filters:
        keep &= probs >= filters["min_p"] * probs.max()
    if "top_p" in filters:
        left = torch.where(keep, probs, 0.0) / probs[keep].sum()
        ranked = left[order]
        keep[order[(ranked.cumsum(0) - ranked) >= filters["top_p"]]] = False
    if kept is not None:
        assert keep.sum() == kept
    draws = 20_000
    tokens = dispatch_logits.sample(logits.expand(draws, 8).contiguous(), impl=impl, **batch(draws, **filters))
    counts = torch.bincount(tokens, minlength=8).double()
    assert counts[~keep].sum() == 0
    expected = probs[keep] / probs[keep].sum() * draws
    chi_square = ((counts[keep] - expected) ** 2 / expected).sum().item()
    # 99.99% quantile of chi-square with 7 degrees of freedom; the draws are fixed by their seeds.
    assert chi_square < 29.9


def test_noise_is_uniform_and_open() -> None:
    numbers = uniform(torch.arange(200), torch.arange(200), 5000)
    assert numbers.min() > 0 and numbers.max() < 1
    counts = torch.histc(numbers, bins=100, min=0, max=1).double()
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 170  # 99.999% quantile, 99 degrees of freedom
    assert torch.isfinite(gumbel(torch.arange(50), torch.arange(50), 5000)).all()
    flat = numbers.flatten() - 0.5
    neighbours = (flat[1:] * flat[:-1]).mean() * 12
    assert abs(neighbours.item()) < 5e-3
    rows = numbers - 0.5
    assert abs((rows[1:] * rows[:-1]).mean().item() * 12) < 5e-3


def test_seed_and_position_are_required() -> None:
    with pytest.raises(ValueError, match="seeds and positions"):
        dispatch_logits.sample(torch.zeros(1, 4), temperature=torch.ones(1))


def test_logprobs() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 2.0], [5.0, 0.0, 0.0, 0.0]])
    chosen, rank, ids, top = dispatch_logits.logprobs(logits, torch.tensor([1, 0]), 2)
    want = logits.log_softmax(-1)
    torch.testing.assert_close(chosen, torch.stack([want[0, 1], want[1, 0]]))
    assert rank.tolist() == [3, 1]
    assert sorted(ids[0].tolist()) == [2, 3] and ids[1, 0] == 0
    torch.testing.assert_close(top[1, 0], want[1, 0])
