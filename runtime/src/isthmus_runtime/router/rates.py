"""Rates of one engine from the totals that it reports at each probe. Pure: time is an argument."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ..protocol.info import LoadInfo

_WINDOW_S = 5.0
"""Rates are means over about this long."""
_STALE_S = 10.0
"""An engine that has not been heard of for so long has no rate."""


class _Sample(NamedTuple):
    at: float
    tokens: int
    sent_bytes: int


class Rates:
    """Totals of the last seconds. They begin anew with the engine's process (`epoch`)."""

    def __init__(self) -> None:
        self._epoch = ""
        self._samples: deque[_Sample] = deque()

    def add(self, now: float, epoch: str, load: LoadInfo) -> None:
        """Add what a probe at `now`, in seconds, has found."""
        samples = self._samples
        if epoch != self._epoch:
            samples.clear()
            self._epoch = epoch
        samples.append(_Sample(now, load.generated_tokens, load.sent_bytes))
        while len(samples) > 2 and samples[1].at <= now - _WINDOW_S:
            samples.popleft()

    def tokens_per_s(self, now: float) -> float:
        """Generated tokens a second."""
        seconds, tokens, _ = self._growth(now)
        return tokens / seconds if seconds else 0.0

    def sent_bytes_per_s(self, now: float) -> float:
        """KV bytes that left for peers, a second."""
        seconds, _, sent = self._growth(now)
        return sent / seconds if seconds else 0.0

    def _growth(self, now: float) -> _Sample:
        if len(self._samples) < 2 or now - self._samples[-1].at > _STALE_S:
            return _Sample(0.0, 0, 0)
        first, last = self._samples[0], self._samples[-1]
        return _Sample(last.at - first.at, last.tokens - first.tokens, last.sent_bytes - first.sent_bytes)
