"""The Grafana dashboards: valid, and asking only for metrics and labels that our processes have."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chart import CHART
from prometheus_client import CollectorRegistry

from isthmus_operator.render.names import ROLE_LABEL, SERVICE_LABEL
from isthmus_operator.shell.telemetry import Metrics
from isthmus_runtime.metrics import EngineMetrics, RequestMetrics, RouterMetrics, TransferMetrics

DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
FROM_SCRAPING = {"namespace", "pod"}


def prometheus_label(label: str) -> str:
    """A pod's label as the Prometheus Operator copies it (`podTargetLabels`)."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", label)


def exported() -> dict[str, set[str]]:
    """Name of each series that engines, routers and the operator export -> its labels."""
    engine, router = CollectorRegistry(), CollectorRegistry()
    requests = RequestMetrics(engine, "m")
    EngineMetrics(engine, "m")
    transfer = TransferMetrics(engine, "m")
    front = RequestMetrics(router, "m", prefix="isthmus_router_")
    routing = RouterMetrics(router, "m")
    # A counter has no series before its labels are known.
    for each in (requests, front):
        each.succeeded("stop", 1.0)
        each.failed(503, "code")
    transfer.failed("stage")
    transfer.prompt("local")
    routing.chosen("pair")
    routing.refused("no-decode")
    routing.leg_failed("prefill", "code")
    routing.prompt("local")
    routing.endpoints("decode", "ready", 1)
    operator = Metrics()
    operator.reconciles.labels("done")
    operator.writes.labels("apply", "Service")
    operator.services.labels("true")
    found: dict[str, set[str]] = {}
    for metric in itertools.chain(engine.collect(), router.collect(), operator.registry.collect()):
        for sample in metric.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


EXPORTED = exported()


def load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", []))
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


ALL_EXPRESSIONS = sorted({(path.name, text) for path in DASHBOARDS for text in expressions(load(path))})


@pytest.mark.parametrize(("name", "expression"), ALL_EXPRESSIONS)
def test_only_metrics_and_labels_that_exist(name: str, expression: str) -> None:
    bare = re.sub(r'"[^"]*"', '""', expression)
    metrics = re.findall(r"\bisthmus_[a-z0-9_]+", bare)
    assert metrics
    for metric in metrics:
        assert metric in EXPORTED
    known = set.union(*(EXPORTED[metric] for metric in metrics)) | FROM_SCRAPING
    known |= {prometheus_label(SERVICE_LABEL), prometheus_label(ROLE_LABEL)}
    matchers = re.findall(r"([a-z_]+)=~?\"", bare)
    grouping = [label for group in re.findall(r"\bby \(([^)]*)\)", bare) for label in group.split(", ")]
    assert {*matchers, *grouping} <= known


def test_what_is_asked_first_has_a_panel() -> None:
    text = " ".join(expression for _, expression in ALL_EXPRESSIONS)
    for metric in (
        "isthmus_router_time_to_first_token_seconds_bucket",
        "isthmus_router_inter_token_latency_seconds_bucket",
        "isthmus_kv_cache_usage_ratio",
        "isthmus_prefix_cache_hits_total",
        "isthmus_xfer_sent_bytes_total",
        "isthmus_xfer_failures_total",
        "isthmus_quarantined_blocks",
        "isthmus_router_choices_total",
    ):
        assert metric in text


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_are_distinct_and_do_not_overlap(path: Path) -> None:
    panels = load(path)["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = itertools.product(
            range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        )
        for cell in cells:
            assert cell not in taken, f"{panel['title']} lies on {taken[cell]}"
            taken[cell] = panel["title"]


def test_dashboards_are_found_and_link_to_each_other() -> None:
    loaded = [load(path) for path in DASHBOARDS]
    uids = {dashboard["uid"] for dashboard in loaded}
    assert len(uids) == len(loaded) >= 2
    for dashboard in loaded:
        for link in dashboard["links"]:
            assert re.findall(r"^/d/([a-z-]+)\?", link["url"])[0] in uids
        sources = {json.dumps(panel["datasource"]) for panel in dashboard["panels"] if panel["type"] != "row"}
        assert sources == {json.dumps({"type": "prometheus", "uid": "${datasource}"})}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_fits_into_a_config_map(path: Path) -> None:
    assert path.stat().st_size < 256 * 1024
