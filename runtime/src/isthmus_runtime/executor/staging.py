"""Host memory of the steps in flight: what a step takes to the device in one copy, and what it brings back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .device.base import Device

_INT64 = 8
_ALIGNED_WORDS = 2
"""Every input begins at a multiple of 16 bytes: Triton compiles a kernel once more for an address that does not."""
_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}


class StagingSlot:
    """The host memory of one step in flight. Its step alone may touch it, until that step is done."""

    def __init__(self, device: Device, *, capacity: int, max_draws: int, prompts: int, answers: int = 0) -> None:
        """`capacity`: int64 words that a step's inputs take at most. `prompts`: tokens of all prompts that begin with a
        step, where no peer computed them; `answers`: int64 words of what a step tells beside its draws. For more of
        these two, memory is made then, and kept."""
        self._device = device
        self.inputs = device.staging(capacity, dtype=torch.int64)
        self.drawn = device.staging(max_draws, dtype=torch.int64)
        """Where the sampled ids come back to."""
        self._tokens = device.staging(prompts, dtype=torch.int32)
        self._used = 0
        self._answers = device.staging(answers, dtype=torch.int64)
        self._answered = 0

    def reset(self) -> None:
        """Begin the next step: the last one is done."""
        self._used = self._answered = 0

    def answer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Staging for what the step brings back beside its draws, or takes there for it, until the slot's next step."""
        words = -(-math.prod(shape) * dtype.itemsize // _INT64)
        end = self._answered + words
        if end > len(self._answers):
            # What was handed out keeps the old memory alive.
            self._answers, self._answered, end = self._device.staging(2 * end, dtype=torch.int64), 0, words
        found = self._answers[self._answered : end].view(dtype)
        self._answered = end
        return found[: math.prod(shape)].view(shape)

    def tokens(self, ids: Sequence[int]) -> Tensor:
        """int32 staging that holds `ids`."""
        end = self._used + len(ids)
        if end > len(self._tokens):
            # What was handed out keeps the old memory alive.
            self._tokens, self._used, end = self._device.staging(2 * end, dtype=torch.int32), 0, len(ids)
        found = self._tokens[self._used : end]
        found.numpy()[:] = ids
        self._used = end
        return found


class Packer:
    """Lays a step's inputs out one after another, in a slot and on the device alike, so that one copy moves them.

    Where something lies follows from the sizes of what was laid out before it: a captured graph finds the inputs of
    every step of its size at the same address.
    """

    def __init__(self, device_words: Tensor) -> None:
        self._device = {
            torch.int64: device_words,
            torch.int32: device_words.view(torch.int32),
            torch.float32: device_words.view(torch.float32),
        }
        self._host: dict[torch.dtype, npt.NDArray[Any]] = {}
        self._words = 0

    def begin(self, slot: StagingSlot) -> None:
        """Lay out into `slot` from its start."""
        words = slot.inputs.numpy()
        self._host = {dtype: words.view(kind) for dtype, kind in _NUMPY.items()}
        self._words = 0

    def take(self, count: int, dtype: torch.dtype) -> tuple[npt.NDArray[Any], Tensor]:
        """Room for `count` elements: to write on the host now, to read on the device once the step was uploaded."""
        per_word = _INT64 // dtype.itemsize
        start = self._words * per_word
        end = start + count
        host, device = self._host[dtype], self._device[dtype]
        assert end <= len(host), (end, len(host))
        self._words = _ALIGNED_WORDS * -(-end // (per_word * _ALIGNED_WORDS))
        return host[start:end], device[start:end]

    @property
    def words(self) -> int:
        """int64 words taken so far."""
        return self._words
