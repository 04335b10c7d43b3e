"""What Prometheus keeps of the `vllm:*` names after the rendered PodMonitor: each of routers or of engines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from isthmus_operator.api.v1alpha1 import parse
from isthmus_operator.render.names import ROLE_LABEL
from isthmus_operator.render.policies import pod_monitor
from isthmus_runtime.metrics import EngineMetrics, RequestMetrics, RouterMetrics

EXAMPLE = Path(__file__).parents[2] / "examples" / "direct.yaml"


def exported(role: str) -> set[str]:
    """Every series of a pod of this role by name."""
    registry = CollectorRegistry()
    if role == "router":
        RouterMetrics(registry, "m")
        requests = RequestMetrics(registry, "m", prefix="isthmus_router_")
    else:
        EngineMetrics(registry, "m").set_cache_config(block_size="16")
        requests = RequestMetrics(registry, "m")
    requests.succeeded("stop", 1.0)
    return {sample.name for metric in registry.collect() for sample in metric.samples}


@pytest.mark.parametrize("engine", ["prefill", "decode", "worker"])
def test_each_name_is_kept_of_one_side(engine: str) -> None:
    monitor = pod_monitor(parse(yaml.safe_load(EXAMPLE.read_text())))
    assert monitor is not None
    label = re.sub(r"[^A-Za-z0-9]", "_", ROLE_LABEL)
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        rules = endpoint["metricRelabelings"]
        assert all(r["action"] == "drop" and r["sourceLabels"] == [label, "__name__"] for r in rules)

        def kept(role: str, rules: list[dict[str, str]] = rules) -> set[str]:
            # As Prometheus does: source labels joined by `;`, the expression anchored at both ends.
            return {n for n in exported(role) if not any(re.fullmatch(r["regex"], f"{role};{n}") for r in rules)}

        everything = {n for n in exported("router") | exported(engine) if n.startswith("vllm:")}
        router, other = ({n for n in kept(role) if n.startswith("vllm:")} for role in ("router", engine))
        assert router & other == set() and router | other == everything
        assert "vllm:time_to_first_token_seconds_bucket" in router and "vllm:num_requests_waiting" in other
        for role in ("router", engine):
            assert {n for n in kept(role) if n.startswith("isthmus_")} == {
                n for n in exported(role) if n.startswith("isthmus_")
            }, "our own names are all kept"
