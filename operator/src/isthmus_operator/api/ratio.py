"""Pure: bounds on the number of prefill pods per decode pod. `rules` asks whether they can be met; `autoscale` meets
them.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

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
        return _nearest(self, prefill, decode)[0] == 0

    def fit(self, wanted: Pair, prefill: Span, decode: Span) -> Pair:
        """The pair within the spans that lies inside and takes the fewest pods away from `wanted`, and of those the
        one that adds the fewest: the role that lags comes up first, and only what it cannot reach takes the other down.
        Where none lies inside, the one that misses by least."""
        if self.miss(*wanted) == 0 and _within(wanted[0], prefill) and _within(wanted[1], decode):
            return wanted
        missed, several = _nearest(self, prefill, decode)
        if missed == 0:
            # Fewer decode pods than wanted take more away the fewer they are; more of them let more prefill pods stay
            # until all do that can, and from there on they are only more.
            def taken(d: int) -> int:
                return max(0, wanted[0] - self._highest(d, prefill))

            at = bisect_left(several, wanted[1])
            below, least = several[max(0, at - 1) : at], taken(several[-1])
            above = bisect_left(several, True, lo=at, key=lambda d: taken(d) <= least)
            several = below + several[above : above + 1]
        return min(
            ((less, more), (p, d))
            for d in several
            for p in self._near(wanted[0], d, prefill)
            if self.miss(p, d) == missed
            for less in (max(0, wanted[0] - p) + max(0, wanted[1] - d),)
            for more in (max(0, p - wanted[0]) + max(0, d - wanted[1]),)
        )[1]

    def _near(self, wanted: int, decode: int, prefill: Span) -> set[int]:
        """Inside the band the nearest to what is wanted; where it holds no whole number, its two neighbours."""
        low, high = self._lowest(decode, prefill), self._highest(decode, prefill)
        return {_clamp(_clamp(wanted, (low, max(low, high))), prefill), _clamp(high, prefill)}

    @property
    def _unit(self) -> int:
        return math.lcm(self.least.denominator, 1 if self.most is None else self.most.denominator)

    def _lowest(self, decode: int, prefill: Span) -> int:
        return max(prefill[0], -(-self.least.numerator * decode // self.least.denominator))

    def _highest(self, decode: int, prefill: Span) -> int:
        if self.most is None:
            return prefill[1]
        return min(prefill[1], self.most.numerator * decode // self.most.denominator)


@lru_cache(maxsize=64)
def _nearest(band: Band, prefill: Span, decode: Span) -> tuple[int, array[int]]:
    """How far the nearest pairs lie outside, and their numbers of decode pods, in order. There are few that lie
    outside: as many are only with ratios that some pair meets."""
    best, found = -1, array("I")
    for d in range(decode[0], decode[1] + 1):
        low, high = band._lowest(d, prefill), band._highest(d, prefill)
        missed = 0 if low <= high else min(band.miss(_clamp(p, prefill), d) for p in (low, high))
        if best < 0 or missed < best:
            best, found = missed, array("I")
        if missed == best:
            found.append(d)
    return best, found


def _within(number: int, span: Span) -> bool:
    return span[0] <= number <= span[1]


def _clamp(number: int, span: Span) -> int:
    return min(max(number, span[0]), span[1])
