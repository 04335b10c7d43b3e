"""Sampling over the persistent batch: what a row draws depends on its own logits, seed and position only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from isthmus_runtime.executor.device.cpu import CpuDevice
from isthmus_runtime.executor.graphs import Graphs
from isthmus_runtime.executor.input_batch import InputBatch
from isthmus_runtime.executor.sampler import outputs, sample, stage_logprobs
from isthmus_runtime.interfaces.steps import Chunk, RowOutput, RowStart, StepPlan
from isthmus_runtime.kv.groups import GroupPlan
from isthmus_runtime.request import SamplingParams

VOCAB = 50


class Rows:
    """Rows of given sampling parameters; `draw` samples logits for some of them, at given positions."""

    def __init__(self, *sampling: SamplingParams, positions: int = 64) -> None:
        device = CpuDevice()
        self._rows = InputBatch(
            device,
            Graphs(device, max_rows=len(sampling), max_tokens=len(sampling), max_len=positions),
            max_rows=len(sampling),
            max_tokens=len(sampling),
            max_len=positions,
            groups=(GroupPlan(block_size=positions),),
            slots=1,
        )
        self._device = device
        starts = tuple(RowStart(row, "r", [1], 1, ((),), params) for row, params in enumerate(sampling))
        self._rows.build(StepPlan(0, starts, (), (), 0), self._rows.slots[0])

    def draw(self, logits: torch.Tensor, rows: list[int], positions: list[int]) -> list[RowOutput]:
        slot = self._rows.slots[0]
        chunks = tuple(Chunk(row, position - 1, 1, 1) for row, position in zip(rows, positions, strict=True))
        inputs = self._rows.build(StepPlan(1, (), (), chunks, len(chunks)), slot)
        self._rows.uploaded[: inputs.words] = slot.inputs[: inputs.words]
        assert inputs.draws is not None
        chosen = sample(logits, inputs.draws, slot.drawn[: len(rows)])
        return outputs(inputs.draws, slot, stage_logprobs(self._device, slot, logits, chosen, inputs.draws))

    def tokens(self, logits: torch.Tensor, rows: list[int], positions: list[int]) -> list[int]:
        return [output.tokens[0] for output in self.draw(logits, rows, positions)]


def params(**values: float) -> SamplingParams:
    return SamplingParams(max_tokens=1, **values)  # type: ignore[arg-type]


def many_draws(logits: torch.Tensor, count: int, sampling: SamplingParams) -> npt.NDArray[np.int64]:
    """`count` draws of one row, at positions 1 and on."""
    batch = Rows(sampling, positions=count + 1)
    return np.array([batch.tokens(logits[None], [0], [at])[0] for at in range(1, count + 1)])


def test_draw_depends_on_seed_and_position_alone() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    kinds = (params(temperature=0.0), params(seed=7), params(seed=7, top_k=5), params(seed=9, top_p=0.8, min_p=0.01))
    batch = Rows(*kinds)
    together = batch.tokens(logits, [0, 1, 2, 3], [3, 4, 5, 6])
    assert together[0] == int(logits[0].argmax())
    for row in range(4):
        alone = batch.tokens(logits[row : row + 1], [row], [3 + row])
        assert alone == [together[row]], f"row {row} drew another token in another batch"


def test_draws_differ_by_seed_and_by_position() -> None:
    flat = torch.zeros(1, 10_000)
    batch = Rows(params(seed=1), params(seed=2))
    draws = {(row, at): batch.tokens(flat, [row], [at])[0] for row in (0, 1) for at in range(1, 20)}
    assert len(set(draws.values())) > 30


@pytest.mark.slow
def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    count = 4000
    drawn = many_draws(logits, count, params(seed=3, temperature=2.0))
    found = np.bincount(drawn, minlength=4) / count
    assert np.abs(found - torch.softmax(logits / 2, 0).numpy()).max() < 0.03


@pytest.mark.parametrize(
    ("filters", "allowed"), [({"top_k": 2}, {0, 1}), ({"top_p": 0.75}, {0, 1}), ({"min_p": 0.5}, {0, 1})]
)
def test_filters_leave_only_the_likely(filters: dict[str, float], allowed: set[int]) -> None:
    logits = torch.log(torch.tensor([0.4, 0.36, 0.14, 0.1]))
    assert set(many_draws(logits, 300, params(seed=3, **filters)).tolist()) == allowed


def test_logprobs_of_the_unfiltered_distribution_where_asked() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    batch = Rows(params(temperature=0.0, logprobs=3), params(temperature=0.0), params(seed=5, logprobs=0))
    found = batch.draw(logits, [0, 1, 2], [1, 1, 1])
    expected = torch.log_softmax(logits, dim=-1)
    assert found[1].logprobs == ()
    for row, count in ((0, 3), (2, 0)):
        (got,) = found[row].logprobs
        assert (got.token_id,) == found[row].tokens and len(got.top) == count
        assert got.logprob == pytest.approx(float(expected[row, got.token_id]), abs=1e-5)
    best, ids = expected[0].topk(3)
    assert [token for token, _ in found[0].logprobs[0].top] == ids.tolist()
    assert [value for _, value in found[0].logprobs[0].top] == pytest.approx(best.tolist(), abs=1e-5)


def test_alternatives_are_those_that_may_be_drawn() -> None:
    logits = torch.full((2, VOCAB), float("-inf"))
    logits[0, [3, 7]] = torch.tensor([1.0, 2.0])
    logits[1, 5] = 0.0
    found = Rows(params(temperature=0.0, logprobs=5), params(temperature=0.0, logprobs=5)).draw(logits, [0, 1], [1, 1])
    assert [[token for token, _ in row.logprobs[0].top] for row in found] == [[7, 3], [5]]
    assert found[1].logprobs[0].logprob == 0.0


def test_no_logprobs_when_nobody_asks() -> None:
    assert Rows(params(temperature=0.0)).draw(torch.zeros(1, VOCAB), [0], [1])[0].logprobs == ()
