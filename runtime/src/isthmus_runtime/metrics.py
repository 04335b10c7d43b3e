"""Prometheus metrics: one class per component, each given a registry; nothing here is global.

Our names start with `isthmus_`. Engines and routers also export the `vllm:*` names that existing dashboards, endpoint
pickers and KEDA queries use, as views of the same numbers: an engine of what it computes, a router of what clients see
(docs/metrics.md). A sum over both would count a request twice: the rendered PodMonitor keeps each name of one of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, which nobody reads


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of what `render` returns."""

_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_ITL_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_E2E_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 600.0)
_TRANSFER_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


def render(registry: CollectorRegistry) -> bytes:
    """All metrics of `registry` in the text format of GET /metrics."""
    return generate_latest(registry)


class Scrapes:
    """Answers GET /metrics, one in each turn of the event loop however many ask at once: one takes milliseconds, and
    streams and probes have their turns between them."""

    def __init__(self, registry: CollectorRegistry, sample: Callable[[], None] = lambda: None) -> None:
        """`sample`: called before each, for what is not counted as it happens."""
        self._registry = registry
        self._sample = sample
        self._turn = asyncio.Lock()

    async def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        async with self._turn:
            self._sample()
            text = render(self._registry)
            await asyncio.sleep(0)  # whoever comes in this turn finds it locked, and is woken alone
            return text


class _Alias(Collector):
    """The samples of one metric under a second name. Costs nothing until scraped."""

    def __init__(self, source: Collector, alias: str) -> None:
        self._source = source
        self._alias = alias

    def collect(self) -> Iterable[Metric]:
        for metric in self._source.collect():
            copy = Metric(self._alias, metric.documentation, metric.type)
            cut = len(metric.name)
            copy.samples = [s._replace(name=self._alias + s.name[cut:]) for s in metric.samples]
            yield copy


class _Names:
    """Creates metrics with the `model_name` label bound, and their `vllm:` views."""

    def __init__(self, registry: CollectorRegistry, model_name: str, prefix: str, vllm_names: bool) -> None:
        self._registry = registry
        self._model = model_name
        self._prefix = prefix
        self._vllm = vllm_names

    def _view(self, metric: Collector, *names: str) -> None:
        for name in filter(None, names if self._vllm else ()):
            self._registry.register(_Alias(metric, f"vllm:{name}"))

    def gauge(self, name: str, text: str, *, vllm: str = "") -> Gauge:
        metric = Gauge(self._prefix + name, text, ("model_name",), registry=self._registry)
        self._view(metric, vllm)
        return metric.labels(self._model)

    def counter(self, name: str, text: str, *, vllm: str = "") -> Counter:
        return self._counter(name, text, (), vllm).labels(self._model)

    def counter_by(self, name: str, text: str, labels: tuple[str, ...], *, vllm: str = "") -> _LabelledCounter:
        return _LabelledCounter(self._counter(name, text, labels, vllm), self._model)

    def histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *, vllm: str = "", also: str = ""
    ) -> Histogram:
        metric = Histogram(self._prefix + name, text, ("model_name",), registry=self._registry, buckets=buckets)
        self._view(metric, vllm, also)
        return metric.labels(self._model)

    def _counter(self, name: str, text: str, labels: tuple[str, ...], vllm: str) -> Counter:
        metric = Counter(self._prefix + name, text, ("model_name", *labels), registry=self._registry)
        self._view(metric, vllm)
        return metric


class _LabelledCounter:
    """A counter whose first label, the model, is already bound."""

    def __init__(self, metric: Counter, model_name: str) -> None:
        self._metric = metric
        self._model = model_name
        self._series: dict[tuple[str, ...], Counter] = {}

    def inc(self, *labels: str, amount: float = 1.0) -> None:
        """Add `amount` to the series of these label values, in the order of construction."""
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = self._metric.labels(self._model, *labels)
        series.inc(amount)


class RequestMetrics:
    """How requests fared, observed once per request where tokens leave the process (API layer or engine server)."""

    def __init__(self, registry: CollectorRegistry, model_name: str, *, prefix: str = "isthmus_") -> None:
        names = _Names(registry, model_name, prefix, vllm_names=True)
        self.time_to_first_token = names.histogram(
            "time_to_first_token_seconds",
            "Arrival to first token.",
            _TTFT_BUCKETS,
            vllm="time_to_first_token_seconds",
        )
        self.inter_token_latency = names.histogram(
            "inter_token_latency_seconds",
            "Between two tokens of a request.",
            _ITL_BUCKETS,
            vllm="inter_token_latency_seconds",
            also="time_per_output_token_seconds",  # what it was called before vLLM 0.11
        )
        self.e2e_latency = names.histogram(
            "e2e_request_latency_seconds", "Arrival to end.", _E2E_BUCKETS, vllm="e2e_request_latency_seconds"
        )
        self.prompt_tokens = names.counter("prompt_tokens", "Prompt tokens received.", vllm="prompt_tokens")
        self.generation_tokens = names.counter("generation_tokens", "Tokens generated.", vllm="generation_tokens")
        self._success = names.counter_by(
            "request_success", "Requests ended with an answer.", ("finished_reason",), vllm="request_success"
        )
        self._failures = names.counter_by(
            "request_failures", "Requests ended with an error; status 499: the client disconnected.", ("status", "code")
        )

    def succeeded(self, finished_reason: str, seconds: float) -> None:
        """Count an answered request; `seconds` from arrival to end."""
        self._success.inc(finished_reason)
        self.e2e_latency.observe(seconds)

    def failed(self, status: int, code: str | None) -> None:
        """Count a request that ended with an error."""
        self._failures.inc(str(status), code or "")


class MemoryMetrics:
    """How near a process is to the limit of its memory, and what it refuses for that."""

    def __init__(self, registry: CollectorRegistry, model_name: str, *, prefix: str = "isthmus_") -> None:
        names = _Names(registry, model_name, prefix, vllm_names=False)
        self.level = names.gauge("memory_level", "0: calm or not watched, 1: large requests are refused, 2: all are.")
        self.share = names.gauge(
            "memory_requests_ratio", "Share of the memory left after the start that requests have taken, 0 to 1."
        )
        self._refusals = names.counter_by(
            "memory_refusals",
            "For want of memory: a large body, a new request, or one that was ended.",
            ("what",),
        )

    def refused(self, what: str) -> None:
        """Count one."""
        self._refusals.inc(what)


class TenantMetrics:
    """What each tenant asks for, by the name in the tenants' file: its keys are in no metric."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        names = _Names(registry, model_name, "isthmus_router_tenant_", vllm_names=False)
        self._requests = names.counter_by("requests", "Requests by tenant and status.", ("tenant", "status"))
        self._tokens = names.counter_by("tokens", "Tokens by tenant: prompt, or generation.", ("tenant", "kind"))

    def ended(self, tenant: str, status: int) -> None:
        """Count a request that ended; 200 is an answer, 499 a client that left."""
        self._requests.inc(tenant, str(status))

    def used(self, tenant: str, prompt: int, generation: int) -> None:
        """Count the tokens of an answer."""
        self._tokens.inc(tenant, "prompt", amount=prompt)
        self._tokens.inc(tenant, "generation", amount=generation)


class EngineMetrics:
    """The scheduler and KV pool of one engine."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        names = _Names(registry, model_name, "isthmus_", vllm_names=True)
        self._registry = registry
        self._model = model_name
        self.running = names.gauge("num_requests_running", "Requests being computed.", vllm="num_requests_running")
        self.waiting = names.gauge("num_requests_waiting", "Requests queued.", vllm="num_requests_waiting")
        self.kv_usage = names.gauge(
            "kv_cache_usage_ratio", "Share of usable KV blocks in use, 0 to 1.", vllm="kv_cache_usage_perc"
        )
        self.prefix_queries = names.counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", vllm="prefix_cache_queries"
        )
        self.prefix_hits = names.counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache.", vllm="prefix_cache_hits"
        )
        self.fetch_queries = names.counter(
            "external_prefix_cache_queries",
            "Prompt tokens that the storage pool was asked for before they are computed.",
            vllm="external_prefix_cache_queries",
        )
        self.fetch_hits = names.counter(
            "external_prefix_cache_hits",
            "Prompt tokens that the storage pool gave, into the prefix cache.",
            vllm="external_prefix_cache_hits",
        )
        self.fetch_failures = names.counter(
            "external_prefix_cache_failures", "Times that the storage pool gave nothing, for a fault."
        )
        self.preemptions = names.counter(
            "num_preemptions", "Requests preempted and recomputed.", vllm="num_preemptions"
        )
        self.drafted = names.counter(
            "draft_tokens", "Tokens guessed by speculative decoding.", vllm="spec_decode_num_draft_tokens"
        )
        self.accepted = names.counter(
            "accepted_draft_tokens", "Guessed tokens that were kept.", vllm="spec_decode_num_accepted_tokens"
        )
        self.forced = names.counter(
            "forced_tokens", "Tokens that a grammar left no choice about, computed together with the token before."
        )
        self.adapters = names.gauge("adapters", "Low-rank adapters that requests may ask for.")
        self.adapter_problems = names.gauge(
            "adapter_problems", "Adapters of --lora-file that could not be loaded; one more where the file is wrong."
        )
        self.quarantined_blocks = names.gauge("quarantined_blocks", "KV blocks a peer may still write.")
        self.never_fit_rejections = names.counter(
            "never_fit_rejections", "Requests refused because they can never fit."
        )
        self.no_progress_seconds = names.gauge(
            "no_progress_seconds", "Time with work waiting and no finished step; 0 while there is progress."
        )

    def set_cache_config(self, **labels: str) -> None:
        """Publish `cache_config_info` once: block_size, num_gpu_blocks, cache_dtype, ... as labels of a constant 1."""
        names = ("model_name", *labels)
        values = (self._model, *labels.values())
        metric = Gauge("isthmus_cache_config_info", "KV cache configuration.", names, registry=self._registry)
        metric.labels(*values).set(1)
        self._registry.register(_Alias(metric, "vllm:cache_config_info"))


class TransferMetrics:
    """KV movement of one engine."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        names = _Names(registry, model_name, "isthmus_", vllm_names=False)
        self._failures = names.counter_by(
            "xfer_failures", "Failed KV transfers by stage of the leg; none that was given up.", ("stage",)
        )
        self.sent_bytes = names.counter("xfer_sent_bytes", "KV bytes sent.")
        self.seconds = names.histogram(
            "xfer_exposed_seconds", "End of a prompt's computation to the record's write.", _TRANSFER_BUCKETS
        )
        self.legs = names.gauge("xfer_legs", "Transfer attempts that are not released yet.")
        self.late_messages = names.counter("late_messages", "Late or duplicate transfer messages, dropped.")
        self._prompts = names.counter_by("xfer_prompts", "Prompts by where their KV came from.", ("source",))

    def failed(self, stage: str, times: int = 1) -> None:
        """Count failed transfers."""
        self._failures.inc(stage, amount=times)

    def prompt(self, source: str) -> None:
        """Count a prompt: `local`, `transferred` or `recomputed`."""
        self._prompts.inc(source)


class RouterMetrics:
    """Choices and legs of the router."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        names = _Names(registry, model_name, "isthmus_router_", vllm_names=True)
        self.in_flight = names.gauge("requests_in_flight", "Requests being answered; one that is still read is none.")
        self.running = names.gauge(
            "num_requests_running", "Requests whose first token has come.", vllm="num_requests_running"
        )
        self.waiting = names.gauge(
            "num_requests_waiting", "Requests without a token so far.", vllm="num_requests_waiting"
        )
        self.kv_usage = names.gauge(
            "kv_cache_usage_ratio",
            "Share of usable KV blocks in use, 0 to 1, of all engines that generate.",
            vllm="kv_cache_usage_perc",
        )
        self.prefix_queries = names.counter(
            "prefix_cache_queries", "Prompt tokens of requests that have a token.", vllm="prefix_cache_queries"
        )
        self.prefix_hits = names.counter(
            "prefix_cache_hits", "Of these, tokens found in the prefix cache of an engine.", vllm="prefix_cache_hits"
        )
        self._choices = names.counter_by("choices", "Routing decisions by reason.", ("reason",))
        self._refusals = names.counter_by("refusals", "Requests that no engine could take, by reason.", ("reason",))
        self._leg_failures = names.counter_by("leg_failures", "Failed legs.", ("leg", "code"))
        self.retries = names.counter("retries", "Requests tried again on another pair.")
        self._prompts = names.counter_by("prompts", "Prompts by where their KV came from.", ("source",))
        self._prefix_blocks = names.counter(
            "prefix_blocks", "Full KV blocks of the prompts that a cache policy has placed."
        )
        self._prefix_hits = names.counter(
            "prefix_hit_blocks", "Of these, leading ones that the policy expected in the cache of the engine it chose."
        )
        self._endpoints = Gauge(
            "isthmus_router_endpoints", "Engines by role and state.", ("role", "state"), registry=registry
        )

    def chosen(self, reason: str) -> None:
        """Count a decision of the policy."""
        self._choices.inc(reason)

    def refused(self, reason: str) -> None:
        """Count a refusal of the policy or of the queue limit."""
        self._refusals.inc(reason)

    def leg_failed(self, leg: str, code: str | None) -> None:
        """Count a failed `prefill` or `decode` leg by error code."""
        self._leg_failures.inc(leg, code or "")

    def prompt(self, source: str) -> None:
        """Count a prompt: `local`, `transferred` or `recomputed`, as decode reported it."""
        self._prompts.inc(source)

    def placed(self, expected: int, blocks: int) -> None:
        """Count a prompt of `blocks` full KV blocks, of which the engine that computes it was expected to have
        `expected`. Their rates' quotient is the hit rate."""
        self._prefix_hits.inc(expected)
        self._prefix_blocks.inc(blocks)

    def endpoints(self, role: str, state: str, count: int) -> None:
        """Publish how many engines of `role` are in `state`."""
        self._endpoints.labels(role, state).set(count)
