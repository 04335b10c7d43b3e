"""Metrics of routers and engines that the documentation names are exported."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from isthmus_runtime.metrics import (
    EngineMetrics,
    MemoryMetrics,
    RequestMetrics,
    RouterMetrics,
    TenantMetrics,
    TransferMetrics,
    render,
)

PAGES = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
NAME = re.compile(r"\b((?:isthmus_|vllm:)[a-z0-9_]*[a-z0-9])\b(?![/.])")
OTHERS = ("isthmus_operator", "isthmus_runtime", "isthmus_dev_service")
"""Packages, metrics of the operator, and the end of a label."""


def exported() -> set[str]:
    engine, router = CollectorRegistry(), CollectorRegistry()
    EngineMetrics(engine, "m").set_cache_config(block_size="16")
    for metrics in (RequestMetrics, TransferMetrics, MemoryMetrics):
        metrics(engine, "m")
    RequestMetrics(router, "m", prefix="isthmus_router_")
    MemoryMetrics(router, "m", prefix="isthmus_router_")
    RouterMetrics(router, "m")
    TenantMetrics(router, "m")
    text = (render(engine) + render(router)).decode()
    return set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))


def test_metrics_that_pages_name_are_exported() -> None:
    told = {name: page.name for page in PAGES for name in NAME.findall(page.read_text(encoding="utf-8"))}
    assert {"vllm:num_requests_waiting", "isthmus_no_progress_seconds"} <= told.keys()
    names = exported()
    wrong = {name: page for name, page in told.items() if name not in names and not name.startswith(OTHERS)}
    assert not wrong
