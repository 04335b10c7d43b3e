"""Tallies export what prometheus_client's own metrics do."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest

from isthmus_runtime.tallies import Spread, Tallies

disable_created_metrics()


def test_they_export_what_the_librarys_own_do(request: pytest.FixtureRequest):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    r = random.Random(seed)
    bounds = (0.005, 0.1, 1.0, 20.0)
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    counter = Counter("a_things", 'What "is" counted.', ("model_name", "kind"), registry=theirs)
    bare = Counter("a_single", "One series.", ("model_name",), registry=theirs).labels("m")
    histogram = Histogram("a_seconds", "Times.", ("model_name",), registry=theirs, buckets=bounds).labels("m")
    tallies = Tallies("a_things", 'What "is" counted.', ("kind",), {"model_name": "m"})
    single = Tallies("a_single", "One series.", (), {"model_name": "m"})
    spread = Spread("a_seconds", "Times.", bounds, {"model_name": "m"})
    for one in (tallies, single, spread):
        ours.register(one)
    tally = single.of()
    assert generate_latest(ours) == generate_latest(theirs)  # nothing was counted yet
    for _ in range(200):
        kind, amount = r.choice(["x", 'y "quoted"\n', ""]), r.randrange(5)
        seconds = r.choice([*bounds, 0.0, 40.0, r.expovariate(1)])
        counter.labels("m", kind).inc(amount)
        tallies.of(kind).inc(amount)
        bare.inc()
        tally.inc()
        histogram.observe(seconds)
        spread.observe(seconds)
    assert generate_latest(ours) == generate_latest(theirs)


def test_no_name_is_taken_twice():
    registry = CollectorRegistry()
    registry.register(Tallies("a", "", (), {}))
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(Tallies("a", "", (), {}))
    registry.register(Spread("b", "", (1.0,), {}))
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(Spread("b", "", (1.0,), {}))
