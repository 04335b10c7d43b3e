"""Sampling over the persistent batch: what a row draws depends on its own logits, seed and position only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from isthmus_runtime.executor.input_batch import InputBatch, SamplingRows
from isthmus_runtime.executor.sampler import sample
from isthmus_runtime.interfaces.steps import RowStart
from isthmus_runtime.kv.groups import GroupPlan
from isthmus_runtime.request import SamplingParams

VOCAB = 50


def batch_of(*sampling: SamplingParams) -> InputBatch:
    batch = InputBatch(max_rows=len(sampling), max_tokens=8, max_len=8, groups=(GroupPlan(block_size=4),))
    for row, params in enumerate(sampling):
        batch.start(RowStart(row, "r", [1], 1, ((),), params))
    return batch


def rows(indices: list[int], positions: list[int]) -> SamplingRows:
    return SamplingRows(rows=np.array(indices, np.int64), positions=np.array(positions, np.int64))


def params(**values: float) -> SamplingParams:
    return SamplingParams(max_tokens=1, **values)  # type: ignore[arg-type]


def test_draw_depends_on_seed_and_position_alone() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    kinds = (params(temperature=0.0), params(seed=7), params(seed=7, top_k=5), params(seed=9, top_p=0.8, min_p=0.01))
    batch = batch_of(*kinds)
    together, _ = sample(logits, rows([0, 1, 2, 3], [3, 4, 5, 6]), batch)
    assert together[0] == int(logits[0].argmax())
    for row in range(4):
        alone, _ = sample(logits[row : row + 1], rows([row], [3 + row]), batch)
        assert alone[0] == together[row], f"row {row} drew another token in another batch"


def test_draws_differ_by_seed_and_by_position() -> None:
    flat = torch.zeros(1, 10_000)
    batch = batch_of(params(seed=1), params(seed=2))
    draws = {(row, at): int(sample(flat, rows([row], [at]), batch)[0][0]) for row in (0, 1) for at in range(1, 20)}
    assert len(set(draws.values())) > 30


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    batch = batch_of(params(seed=3, temperature=2.0))
    count = 4000
    drawn, _ = sample(logits.expand(count, 4).contiguous(), rows([0] * count, list(range(count))), batch)
    found = np.bincount(drawn, minlength=4) / count
    assert np.abs(found - torch.softmax(logits / 2, 0).numpy()).max() < 0.03


@pytest.mark.parametrize(
    ("filters", "allowed"), [({"top_k": 2}, {0, 1}), ({"top_p": 0.75}, {0, 1}), ({"min_p": 0.5}, {0, 1})]
)
def test_filters_leave_only_the_likely(filters: dict[str, float], allowed: set[int]) -> None:
    logits = torch.log(torch.tensor([0.4, 0.36, 0.14, 0.1]))
    batch = batch_of(params(seed=3, **filters))
    count = 300
    drawn, _ = sample(logits.expand(count, 4).contiguous(), rows([0] * count, list(range(count))), batch)
    assert set(drawn.tolist()) == allowed


def test_logprobs_of_the_unfiltered_distribution_where_asked() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    batch = batch_of(params(temperature=0.0, logprobs=3), params(temperature=0.0), params(seed=5, logprobs=0))
    chosen, found = sample(logits, rows([0, 1, 2], [1, 1, 1]), batch)
    expected = torch.log_softmax(logits, dim=-1)
    assert found[1] is None and found[0] is not None and found[2] is not None
    for row, count in ((0, 3), (2, 0)):
        got = found[row]
        assert got is not None
        assert got.token_id == chosen[row] and len(got.top) == count
        assert got.logprob == pytest.approx(float(expected[row, got.token_id]), abs=1e-5)
    best, ids = expected[0].topk(3)
    assert [token for token, _ in found[0].top] == ids.tolist()
    assert [value for _, value in found[0].top] == pytest.approx(best.tolist(), abs=1e-5)


def test_no_logprobs_when_nobody_asks() -> None:
    assert sample(torch.zeros(1, VOCAB), rows([0], [1]), batch_of(params(temperature=0.0)))[1] == ()
