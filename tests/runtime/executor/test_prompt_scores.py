"""Which positions of a step are scored."""

from __future__ import annotations

import numpy as np

from isthmus_runtime.executor.prompt_scores import ScoredRows
from isthmus_runtime.interfaces.steps import RowStart
from isthmus_runtime.request import SamplingParams


def test_a_row_that_is_taken_over_is_no_longer_scored() -> None:
    rows, sampling = ScoredRows(), SamplingParams(max_tokens=1)
    columns = np.array([[2, 5], [0, 0], [4, 3], [0, 0]])
    rows.set(RowStart(5, "r", [1] * 9, 9, (), sampling, prompt_logprobs=0))
    assert [tuple(part) for part in rows.of(columns)] == [(1, 5, 4, 0, 3, 0)]
    rows.set(RowStart(5, "s", [1] * 9, 9, (), sampling))
    assert rows.of(columns) == ()
