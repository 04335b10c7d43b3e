"""The ports of a router or an engine, from the first request to the end of the process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from fastapi import FastAPI

from ..config import ServerConfig
from ..serving.app import add_pages, make_app
from ..serving.in_flight import InFlight
from ..serving.limits import limits_of
from ..serving.memory import MemoryGuard
from ..serving.server import beside, run_app
from ..structured.checker import Checker
from ..tracing.span import Tracer
from ..transfer.sockets import probe_accepted


class Probed(Protocol):
    """What answers probes and scrapers."""

    def add_probes(self, app: FastAPI) -> None:
        """Add the routes of probes."""

    def add_metrics(self, app: FastAPI) -> None:
        """Add /metrics, and what else is not for clients."""


async def serve_ports(
    app: FastAPI,
    probed: Probed,
    config: ServerConfig,
    *,
    role: str,
    lame_duck_s: float,
    in_flight: InFlight,
    memory: MemoryGuard,
    checker: Checker,
    tracer: Tracer,
    on_started: Callable[[int], None],
    stop: asyncio.Event | None = None,
    before_close: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serve `app`, which has its probes, on `config.port` until the process is to end, as `run_app` says. Metrics are
    on it, or on a port of their own with the probes again. `checker` and `tracer` are closed at the end.

    Raises:
        ConfigError: a port cannot be bound.
    """
    add_pages(app)
    apart = make_app(f"Isthmus {role}: metrics and probes", bodies=()) if config.metrics_port else None
    probed.add_metrics(app if apart is None else apart)
    if apart is not None:
        probed.add_probes(apart)

    def started(port: int) -> None:
        probe_accepted()
        on_started(port)

    try:
        async with beside(apart, host=config.host, port=config.metrics_port):
            await run_app(
                app,
                host=config.host,
                port=config.port,
                drain_timeout_s=config.drain_timeout_s,
                lame_duck_s=lame_duck_s,
                in_flight=in_flight,
                limits=limits_of(config),
                memory=memory,
                stop=stop,
                before_close=before_close,
                on_started=started,
            )
    finally:
        await checker.close()
        await asyncio.to_thread(tracer.close)
