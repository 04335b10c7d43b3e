"""The names and views of metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from isthmus_runtime.metrics import EngineMetrics, RequestMetrics, RouterMetrics, TransferMetrics, render


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


def test_routers_export_no_engine_names():
    registry = CollectorRegistry()
    RouterMetrics(registry, "m")
    RequestMetrics(registry, "m", prefix="isthmus_router_", vllm_names=False)
    names = {line.split()[2] for line in render(registry).decode().splitlines() if line.startswith("# TYPE")}
    assert names and all(name.startswith("isthmus_router_") for name in names)
