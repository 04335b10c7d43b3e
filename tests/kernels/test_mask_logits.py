"""Masks over logits: the fast form equals the definition, other rows stay as they are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_kernels import dispatch_logits, native


@settings(max_examples=60)
@given(
    vocab=st.integers(1, 70),
    width=st.integers(1, 9),
    masked=st.sets(st.integers(0, 4)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
    impl=st.sampled_from(["cpu", "torch"] if native.available() else ["torch"]),
)
def test_fast_forms_equal_the_reference(
    vocab: int, width: int, masked: set[int], dtype: torch.dtype, seed: int, impl: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, vocab, generator=generator).to(dtype)
    rows = torch.tensor(sorted(masked), dtype=torch.int64)
    masks = torch.randint(0, 256, (len(rows), width), generator=generator, dtype=torch.uint8)
    want, got = logits.clone(), logits.clone()
    dispatch_logits.mask_logits(want, rows, masks, impl="reference")
    dispatch_logits.mask_logits(got, rows, masks, impl=impl)
    assert torch.equal(want, got)
    for row in set(range(5)) - masked:
        assert torch.equal(got[row], logits[row])


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_bits_are_counted_from_the_lowest(impl: str) -> None:
    logits = torch.zeros(1, 12)
    dispatch_logits.mask_logits(logits, torch.tensor([0]), torch.tensor([[0b0000_0101]], dtype=torch.uint8), impl=impl)
    assert [i for i, value in enumerate(logits[0].tolist()) if value == 0] == [0, 2]
