"""Pure: bounds on the number of prefill pods per decode pod. `rules` asks whether they can be met; `autoscale` meets
them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

Span = tuple[int, int]
"""Fewest and most pods of a role, both included."""
Pair = tuple[int, int]
"""Pods of prefill and of decode."""


@dataclass(frozen=True, slots=True)
class Band:
    """`least` <= prefill / decode <= `most`; a `most` of None is no bound. Compared in whole numbers, so exactly."""

    least: Fraction
    most: Fraction | None

    def miss(self, prefill: int, decode: int) -> int:
        """How far a pair lies outside, in `1/unit` prefill pods; 0 inside."""
        unit = self._unit
        below = int(self.least * unit) * decode - unit * prefill
        above = 0 if self.most is None else unit * prefill - int(self.most * unit) * decode
        return max(0, below, above)

    def satisfiable(self, prefill: Span, decode: Span) -> bool:
        """Whether any pair of numbers of pods lies inside."""
        return any(self._lowest(d, prefill) <= self._highest(d, prefill) for d in range(decode[0], decode[1] + 1))

    def fit(self, wanted: Pair, prefill: Span, decode: Span) -> Pair:
        """The pair within the spans that lies inside and takes the fewest pods away from `wanted`, and of those the
        one that adds the fewest: the role that lags comes up first, and only what it cannot reach takes the other down.
        Where none lies inside, the one that misses by least."""
        if self.miss(*wanted) == 0 and _within(wanted[0], prefill) and _within(wanted[1], decode):
            return wanted
        best: tuple[tuple[int, int, int], Pair] | None = None
        for d in range(decode[0], decode[1] + 1):
            # Inside the band the nearest to what is wanted; where it holds no whole number, one of its two neighbours.
            low, high = self._lowest(d, prefill), self._highest(d, prefill)
            for p in {_clamp(_clamp(wanted[0], (low, max(low, high))), prefill), _clamp(high, prefill)}:
                less = max(0, wanted[0] - p) + max(0, wanted[1] - d)
                more = max(0, p - wanted[0]) + max(0, d - wanted[1])
                found = (self.miss(p, d), less, more), (p, d)
                best = found if best is None or found < best else best
        assert best is not None, "a span holds at least one number"
        return best[1]

    @property
    def _unit(self) -> int:
        return math.lcm(self.least.denominator, 1 if self.most is None else self.most.denominator)

    def _lowest(self, decode: int, prefill: Span) -> int:
        return max(prefill[0], -(-self.least.numerator * decode // self.least.denominator))

    def _highest(self, decode: int, prefill: Span) -> int:
        if self.most is None:
            return prefill[1]
        return min(prefill[1], self.most.numerator * decode // self.most.denominator)


def _within(number: int, span: Span) -> bool:
    return span[0] <= number <= span[1]


def _clamp(number: int, span: Span) -> int:
    return min(max(number, span[0]), span[1])
