"""Hit rates of the routing policies on traces with fixed seeds: their order, and the bound."""

from __future__ import annotations

import pytest

from isthmus_runtime.sim.routing import ORACLE, RoutingWorld, compare
from isthmus_runtime.sim.traces import generate_trace, read_trace, write_trace


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("routers", [1, 2])
def test_order_of_the_policies(seed, routers):
    trace = generate_trace(rate=4, duration_s=150, seed=seed)
    found = {r.policy: r for r in compare(trace, RoutingWorld(routers=routers))}
    rate = {name: r.hit_rate for name, r in found.items()}
    print(f"seed {seed} routers {routers}: {rate}")
    assert rate[ORACLE] >= rate["kv-aware"] > rate["round-robin"]
    assert rate["prefix-aware"] > rate["round-robin"]
    assert rate["kv-aware"] >= rate["prefix-aware"] - 0.01
    if routers > 1:  # a router does not know what another has sent
        assert rate["kv-aware"] > rate["prefix-aware"]
    assert found["kv-aware"].mean_wait_s < found["round-robin"].mean_wait_s
    assert all(r.imbalance < 1.6 for r in found.values())


def test_the_mooncake_format_gives_the_same(tmp_path):
    trace = generate_trace(rate=4, duration_s=60, seed=9)
    file = tmp_path / "trace.jsonl"
    write_trace(file, trace)
    direct, read = compare(trace, RoutingWorld()), compare(read_trace(file), RoutingWorld())
    for a, b in zip(direct, read, strict=True):  # times are rounded to milliseconds there
        assert (a.policy, a.hit_rate) == (b.policy, pytest.approx(b.hit_rate, abs=0.05))


def test_one_engine_leaves_no_choice():
    trace = generate_trace(rate=2, duration_s=60, seed=3)
    rates = {r.hit_rate for r in compare(trace, RoutingWorld(engines=1)) if r.policy != ORACLE}
    assert len(rates) == 1
