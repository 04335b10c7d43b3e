"""The names and views of metrics."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from isthmus_runtime.metrics import EngineMetrics, RequestMetrics, RouterMetrics, Scrapes, TransferMetrics, render


def test_vllm_names_are_views_of_ours():
    registry = CollectorRegistry()
    engine = EngineMetrics(registry, "m")
    requests = RequestMetrics(registry, "m")
    TransferMetrics(registry, "m").failed("SENDING")
    engine.set_cache_config(block_size="16", num_gpu_blocks="10")
    engine.running.set(3)
    engine.kv_usage.set(0.5)
    engine.prefix_hits.inc(7)
    requests.time_to_first_token.observe(0.02)
    requests.succeeded("stop", 1.0)
    requests.failed(499, "cancelled")
    text = render(registry).decode()
    for line in (
        'vllm:num_requests_running{model_name="m"} 3.0',
        'isthmus_num_requests_running{model_name="m"} 3.0',
        'vllm:kv_cache_usage_perc{model_name="m"} 0.5',
        'vllm:prefix_cache_hits_total{model_name="m"} 7.0',
        'vllm:time_to_first_token_seconds_count{model_name="m"} 1.0',
        'vllm:time_to_first_token_seconds_bucket{le="0.02",model_name="m"} 1.0',
        'vllm:request_success_total{finished_reason="stop",model_name="m"} 1.0',
        'vllm:cache_config_info{block_size="16",model_name="m",num_gpu_blocks="10"} 1.0',
        'isthmus_request_failures_total{code="cancelled",model_name="m",status="499"} 1.0',
        'isthmus_xfer_failures_total{model_name="m",stage="SENDING"} 1.0',
        "# TYPE vllm:time_to_first_token_seconds histogram",
        "# TYPE vllm:num_preemptions_total counter",
        "# TYPE vllm:inter_token_latency_seconds histogram",
        "# TYPE vllm:e2e_request_latency_seconds histogram",
        "# TYPE vllm:num_requests_waiting gauge",
        "# TYPE vllm:prefix_cache_queries_total counter",
    ):
        assert line in text, line


def test_routers_have_the_same_names_of_what_clients_see():
    registry = CollectorRegistry()
    router = RouterMetrics(registry, "m")
    front = RequestMetrics(registry, "m", prefix="isthmus_router_")
    router.running.set(2)
    router.prefix_hits.inc(5)
    front.inter_token_latency.observe(0.02)
    text = render(registry).decode()
    for line in (
        'vllm:num_requests_running{model_name="m"} 2.0',
        'isthmus_router_num_requests_running{model_name="m"} 2.0',
        'vllm:prefix_cache_hits_total{model_name="m"} 5.0',
        'vllm:inter_token_latency_seconds_count{model_name="m"} 1.0',
        'vllm:time_per_output_token_seconds_count{model_name="m"} 1.0',
        'vllm:num_requests_waiting{model_name="m"} 0.0',
        'vllm:kv_cache_usage_perc{model_name="m"} 0.0',
        'vllm:e2e_request_latency_seconds_count{model_name="m"} 0.0',
        'vllm:prompt_tokens_total{model_name="m"} 0.0',
    ):
        assert line in text, line
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert all(name.startswith(("isthmus_router_", "vllm:")) for name in names)


TABLE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_documented_table_is_what_is_exported():
    engine, router = CollectorRegistry(), CollectorRegistry()
    EngineMetrics(engine, "m").set_cache_config(block_size="16")
    RequestMetrics(engine, "m")
    RouterMetrics(router, "m")
    RequestMetrics(router, "m", prefix="isthmus_router_")
    documented = re.findall(
        r"^\| `vllm:([a-z0-9_]+)`(?:, `vllm:([a-z0-9_]+)`)? \| (.) \| (.) \|", TABLE.read_text(), re.M
    )
    for column, registry in ((2, engine), (3, router)):
        told = {name for row in documented for name in row[:2] if name and row[column] != "–"}
        exported = {m.name.removeprefix("vllm:") for m in registry.collect() if m.name.startswith("vllm:")}
        suffixed = {f"{name}_total" for name in exported}
        assert {name for name in told if name not in exported | suffixed} == set()
        assert {name for name in exported if name not in told and f"{name}_total" not in told} == set()


def test_scrapes_that_come_together_take_turns_with_all_else() -> None:
    """Hundreds that had come at once kept probes and streams waiting until the last was answered."""
    turns, at = 0, list[int]()

    async def main() -> None:
        nonlocal turns
        scrapes = Scrapes(CollectorRegistry(), lambda: at.append(turns))
        asked = [asyncio.ensure_future(scrapes.text()) for _ in range(50)]
        while not all(one.done() for one in asked):
            turns += 1
            await asyncio.sleep(0)

    asyncio.run(main())
    assert len(at) == len(set(at)) == 50
