"""Counters and histograms that cost an addition: for the path of each request and token.

They are of one thread, the event loop's, which also renders them; so unlike prometheus_client's they need no lock. What
they export is the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
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
    """A counter with labels; `name` without `_total`."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str]) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._series: dict[tuple[str, ...], Tally] = {}

    def labels(self, *values: str) -> Tally:
        """The series of these label values, in the order of construction."""
        found = self._series.get(values)
        if found is None:
            assert len(values) == len(self._labels), (self._labels, values)
            found = self._series[values] = Tally()
        return found

    def collect(self) -> Iterable[Metric]:
        """For the registry."""
        metric = Metric(self._name, self._documentation, "counter")
        for values, tally in self._series.items():
            metric.add_sample(self._name + "_total", dict(zip(self._labels, values, strict=True)), tally.value)
        yield metric


class Spread(Collector):
    """A histogram with the one label `model_name`."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float], model_name: str) -> None:
        """`bounds`: of the buckets, ascending, each included; a last one without bound is added."""
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._labels = {"model_name": model_name}

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        """For the registry."""
        metric = Metric(self._name, self._documentation, "histogram")
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), accumulate(self._counts), strict=True):
            metric.add_sample(self._name + "_bucket", {**self._labels, "le": bound}, count)
        metric.add_sample(self._name + "_count", self._labels, sum(self._counts))
        metric.add_sample(self._name + "_sum", self._labels, self._sum)
        yield metric
