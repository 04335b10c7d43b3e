"""The operator's own metrics, and /readyz, /metrics and /healthz over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .door import listening

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """What the operator counts. One registry per instance."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconciles = Counter(
            "isthmus_operator_reconciles", "Runs of reconcile, by result.", ("result",), registry=self.registry
        )
        self.seconds = Histogram(
            "isthmus_operator_reconcile_seconds", "Time of one run.", buckets=_SECONDS, registry=self.registry
        )
        self.writes = Counter(
            "isthmus_operator_writes", "Requests that change the cluster.", ("verb", "kind"), registry=self.registry
        )
        self.services = Gauge(
            "isthmus_operator_services", "InferenceServices by readiness.", ("ready",), registry=self.registry
        )
        self.queue = Gauge("isthmus_operator_queue_depth", "Services that wait for a worker.", registry=self.registry)
        self.leader = Gauge("isthmus_operator_leader", "1 while this replica holds the lease.", registry=self.registry)

    def written(self, verb: str, kind: str) -> None:
        """Count one write."""
        self.writes.labels(verb, kind).inc()


@asynccontextmanager
async def serve(metrics: Metrics, host: str, port: int, *, unready: Callable[[], str]) -> AsyncIterator[int]:
    """Serve until the context ends; yields the port. `unready`: why not; empty when it is ready."""

    async def readyz(request: web.Request) -> web.Response:
        problem = unready()
        return web.Response(status=503 if problem else 200, text=f"{problem or 'ok'}\n")

    async def show(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), content_type="text/plain", charset="utf-8")

    async with listening({("GET", "/readyz"): readyz, ("GET", "/metrics"): show}, host, port) as bound:
        yield bound


@asynccontextmanager
async def serve_health(host: str, port: int) -> AsyncIterator[int]:
    """Serve /healthz until the context ends; yields the port. That there is an answer is what counts: it comes from the
    event loop that does all else. Not kopf's endpoint, where anybody's connections take all descriptors."""

    async def healthz(request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async with listening({("GET", "/healthz"): healthz}, host, port) as bound:
        yield bound
