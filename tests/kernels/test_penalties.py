"""Penalties: the fast form equals the definition, and rows without one stay as they are."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_kernels import dispatch_logits


@settings(max_examples=60)
@given(
    vocab=st.integers(1, 40),
    penalised=st.sets(st.integers(0, 39), max_size=40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_torch_equals_the_reference(vocab: int, penalised: set[int], dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(40, vocab, generator=generator) * 3).to(dtype)
    logits[:, ::5] = float("-inf")
    tokens = torch.randint(0, vocab, (50, 30), generator=generator, dtype=torch.int32)
    draws = torch.tensor(sorted(penalised), dtype=torch.int64)
    count = len(draws)
    ends = torch.randint(1, 31, (count,), generator=generator)
    starts = (ends * torch.rand(count, generator=generator)).long()
    rows = torch.randperm(50, generator=generator)[:count]
    factors = [torch.rand(count, generator=generator) + 0.5 for _ in range(3)]
    most = int(ends.max()) if count else 0
    want, got = logits.clone(), logits.clone()
    dispatch_logits.penalize(want, tokens, draws, rows, starts, ends, *factors, most=most, impl="reference")
    dispatch_logits.penalize(got, tokens, draws, rows, starts, ends, *factors, most=most, impl="torch")
    assert not got.isnan().any()
    torch.testing.assert_close(got, want, rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-5)
    for row in set(range(40)) - penalised:
        assert torch.equal(got[row], logits[row])
