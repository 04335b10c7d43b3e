"""The rows' sampling parameters, kept as the sampler takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..request import SamplingParams

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
_HOTTEST = 3e38
"""Of what fp32 holds. Divided by infinity, what is masked would be no number."""
_LEAST_INT64, _UINT64 = -(2**63), 2**64


class SamplingRows:
    """Temperature, seed, filters and wanted log-probabilities, a row each."""

    def __init__(self, max_rows: int) -> None:
        self._temperature = np.zeros(max_rows, np.float32)
        self._seeds = np.zeros(max_rows, np.int64)
        self._logprobs = np.full(max_rows, -1, np.int32)
        # By name in SamplingParams and in the sampler alike: the values, and which of them filter at all.
        self._filters: dict[str, tuple[npt.NDArray[Any], Callable[[Any], npt.NDArray[np.bool_]]]] = {
            "top_k": (np.zeros(max_rows, np.int32), lambda k: k > 0),
            "top_p": (np.ones(max_rows, np.float32), lambda p: p < 1),
            "min_p": (np.zeros(max_rows, np.float32), lambda p: p > 0),
        }

    def set(self, row: int, sampling: SamplingParams) -> None:
        """Set what the row's request asks for."""
        self._temperature[row] = min(sampling.temperature, _HOTTEST)
        # Any whole number is a seed: it is taken modulo 2^64.
        self._seeds[row] = (sampling.seed - _LEAST_INT64) % _UINT64 + _LEAST_INT64
        self._logprobs[row] = sampling.logprobs
        for name, (values, _) in self._filters.items():
            values[row] = getattr(sampling, name)

    def of(self, rows: Longs) -> tuple[dict[str, npt.NDArray[Any]], Ints]:
        """Arguments of the sampler for `rows`, none when all are greedy; and the log-probabilities they want."""
        wanted = self._logprobs[rows]
        temperature = self._temperature[rows]
        if not temperature.any():
            return {}, wanted
        found: dict[str, npt.NDArray[Any]] = {"temperature": temperature, "seeds": self._seeds[rows]}
        for name, (values, used) in self._filters.items():
            chosen = values[rows]
            if used(chosen).any():
                found[name] = chosen
        return found, wanted
