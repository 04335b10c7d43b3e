"""The cheapest split of prefill and decode engines that meets an SLO, for one trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import ConfigError
from .planner import Cluster, Report, Slo, simulate
from .traces import TraceRequest

ENGINES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Tried:
    """One split and the share of requests within the SLO."""

    prefills: int
    decodes: int
    attainment: float


@dataclass(frozen=True, slots=True)
class Found:
    """The cheapest split, its report, and everything that was tried on the way."""

    cluster: Cluster
    report: Report
    tried: tuple[Tried, ...]


class _Search:
    def __init__(self, base: Cluster, trace: Sequence[TraceRequest], slo: Slo) -> None:
        self.base, self.trace, self.slo = base, trace, slo
        self.reports: dict[tuple[int, int], Report] = {}

    def run(self, prefills: int, decodes: int) -> float:
        key = (prefills, decodes)
        if key not in self.reports:
            self.reports[key] = simulate(replace(self.base, prefills=prefills, decodes=decodes), self.trace, self.slo)
        return self.reports[key].attainment

    def best(self, total: int, share: float) -> tuple[int, int]:
        """Climb from the split by work to the best one of `total` engines."""
        here = min(max(1, round(total * share)), total - 1)
        while True:
            near = [p for p in (here - 1, here, here + 1) if 1 <= p < total]
            top = max(near, key=lambda p: (self.run(p, total - p), p == here))
            if top == here:
                return here, total - here
            here = top


def search(base: Cluster, trace: Sequence[TraceRequest], slo: Slo, wanted: float) -> Found:
    """Fewest engines with at least `wanted` of the requests within the SLO.

    Doubles the number of engines until it is enough, then halves the interval; for each number it climbs from the
    split that the work suggests. Assumes that more engines never do worse and that attainment has one peak over
    splits; both hold but for small wobbles, so the answer may be off by an engine.

    Raises:
        ConfigError: no number of engines is enough (a single request alone misses the SLO).
    """
    finder = _Search(base, trace, slo)
    total, low = 2, 1
    while True:
        share = 0.5
        if finder.reports:
            last = finder.reports[max(finder.reports, key=sum)]
            share = last.prefill_busy_s / max(1e-9, last.prefill_busy_s + last.decode_busy_s)
        split = finder.best(total, share)
        if finder.run(*split) >= wanted:
            break
        if total >= ENGINES_MAX or (total > 8 * len(trace)):
            best = finder.run(*split)
            raise ConfigError(
                f"{total} engines reach {best:.1%} within TTFT {slo.ttft_s:g} s and ITL {slo.itl_s * 1000:g} ms, "
                f"{wanted:.1%} is required; relax the SLO, raise --tp or take a faster GPU"
            )
        low, total = total, total * 2
    high, found = total, split
    while high - low > 1:
        middle = (low + high) // 2
        split = finder.best(middle, found[0] / sum(found))
        if finder.run(*split) >= wanted:
            high, found = middle, split
        else:
            low = middle
    tried = tuple(Tried(p, d, r.attainment) for (p, d), r in sorted(finder.reports.items(), key=lambda kv: sum(kv[0])))
    cluster = replace(base, prefills=found[0], decodes=found[1])
    return Found(cluster, finder.reports[found], tried)
