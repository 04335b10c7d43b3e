"""Counters and histograms that cost an addition: for the path of each request and token.

They are of one thread, the event loop's, which also renders them; so unlike prometheus_client's they need no lock. What
they export is the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import Metric
from prometheus_client.registry import Collector


class Tally:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add `amount`, which is not negative."""
        self.value += amount


class Tallies(Collector):
    """A counter, by the values of its labels."""

    def __init__(self, name: str, text: str, labels: Sequence[str], always: Mapping[str, str]) -> None:
        """`name` without `_total`; `always`: labels of every series, with their values."""
        self._name, self._text = name, text
        self._labels, self._always = tuple(labels), dict(always)
        self._series: dict[tuple[str, ...], Tally] = {}

    def of(self, *values: str) -> Tally:
        """The series of these values, in the order of the labels. It is exported from now on."""
        found = self._series.get(values)
        if found is None:
            assert len(values) == len(self._labels), (self._labels, values)
            found = self._series[values] = Tally()
        return found

    def collect(self) -> Iterable[Metric]:
        """For the registry."""
        metric = Metric(self._name, self._text, "counter")
        for values, tally in self._series.items():
            labels = self._always | dict(zip(self._labels, map(str, values), strict=True))
            metric.add_sample(f"{self._name}_total", labels, tally.value)
        return (metric,)

    describe = collect  # or the registry would take the same name twice


class Spread(Collector):
    """A histogram of one series."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Mapping[str, str]) -> None:
        """`bounds`: of the buckets, rising, each included; a last one without bound is added."""
        self._name, self._text = name, text
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._labels = dict(labels)

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        """For the registry."""
        metric = Metric(self._name, self._text, "histogram")
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), accumulate(self._counts), strict=True):
            metric.add_sample(f"{self._name}_bucket", {**self._labels, "le": bound}, count)
        metric.add_sample(f"{self._name}_count", self._labels, sum(self._counts))
        metric.add_sample(f"{self._name}_sum", self._labels, self._sum)
        return (metric,)

    describe = collect
