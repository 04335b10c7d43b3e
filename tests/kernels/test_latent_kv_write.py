"""Latent attention: what is turned and written, attention over rows that are keys and values, and its routing."""

import pytest
import torch

from isthmus_kernels import dispatch, native

IMPLS = ["reference", *(["cpu"] if native.available() else [])]
DTYPES = [torch.float32, torch.bfloat16]
LATENT, TURNED, HEADS, BLOCK = 48, 16, 4, 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_rows_are_turned_and_written(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q = torch.randn(5, HEADS, 24 + TURNED).to(dtype)
    row = torch.randn(5, LATENT + TURNED).to(dtype)
    positions, slots = torch.tensor([3, 4, 0, 9, 2]), torch.tensor([9, -1, 30, 8, 17])
    angles = torch.outer(torch.arange(12.0), torch.tensor([1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005]))
    kv = torch.full((4, 1, BLOCK, 1, LATENT + TURNED), 7.0, dtype=kv_dtype)
    want_q, want_row = q.clone(), row.clone()
    for part in (want_q[..., 24:], want_row[:, LATENT:]):
        for token, position in enumerate(positions):
            pairs = torch.complex(part[token, ..., :8].float(), part[token, ..., 8:].float())
            turned = pairs * torch.polar(torch.ones(8), angles[position])
            part[token] = torch.cat([turned.real, turned.imag], dim=-1).to(dtype)
    dispatch.latent_kv_write(q[..., 24:], row, positions, angles.cos(), angles.sin(), kv, slots)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(q, want_q, **tolerance)
    torch.testing.assert_close(row, want_row, **tolerance)
    written = slots[slots >= 0]
    assert torch.equal(kv[written // BLOCK, 0, written % BLOCK, 0], row[slots >= 0].to(kv_dtype))
    others = torch.ones(4, BLOCK, dtype=torch.bool)
    others[written // BLOCK, written % BLOCK] = False
    assert (kv[:, 0, :, 0][others] == 7.0).all(), "a row that nobody wrote changed"


def test_wrong_shapes_are_named() -> None:
    zeros = torch.zeros
    with pytest.raises(ValueError, match=r"kv: expected \[num_blocks, 1, block_size, 1, 64\] and q \[T, Hq, 16\]"):
        dispatch.latent_kv_write(
            zeros(1, 2, 16),
            zeros(1, 64),
            zeros(1).long(),
            zeros(9, 8),
            zeros(9, 8),
            zeros(2, 2, 8, 1, 64),
            zeros(1).long(),
        )


def test_attention_over_rows_that_are_keys_and_values() -> None:
    """A view whose keys and values are one memory."""
    torch.manual_seed(1)
    kv = torch.randn(6, 1, BLOCK, 1, 64)
    q, table = torch.randn(3, HEADS, 64), torch.tensor([[5, 2, 1]], dtype=torch.int32)
    batch = (table, torch.tensor([0, 3], dtype=torch.int32), torch.tensor([20], dtype=torch.int32))
    options = {"scale": 0.2, "max_query_len": 3, "max_seq_len": 20}
    expected = dispatch.paged_attention(q, kv.repeat(1, 2, 1, 1, 1), *batch, **options, impl="reference")  # type: ignore[arg-type]
    found = dispatch.paged_attention(q, kv.expand(-1, 2, -1, -1, -1), *batch, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("biased", [False, True])
def test_experts_are_chosen_out_of_the_best_groups(biased: bool, impl: str) -> None:
    torch.manual_seed(2)
    logits = torch.randn(50, 12)
    bias = torch.rand(12) if biased else None
    weights, experts = dispatch.moe_route(
        logits, 3, renormalize=False, sigmoid=biased, bias=bias, groups=(4, 2), scale=2.5, impl=impl
    )
    scores = logits.sigmoid() if biased else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    for token in range(50):
        groups = choice[token].view(4, 3)
        worth = groups.sort(descending=True).values[:, : 2 if biased else 1].sum(1)
        allowed = {3 * int(group) + i for group in worth.topk(2).indices for i in range(3)}
        best = sorted(allowed, key=lambda expert: -float(choice[token, expert]))[:3]
        assert experts[token].tolist() == best
        torch.testing.assert_close(weights[token], scores[token, best] * 2.5)
