"""The router's own routes and its background work. `commands.serve_router` adds the OpenAI routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from starlette.responses import PlainTextResponse, Response

from ..config import RouterConfig
from ..credentials import Credentials
from ..errors import Overloaded
from ..metrics import CONTENT_TYPE, RouterMetrics, Scrapes
from ..serving.app import errors
from ..serving.in_flight import InFlight
from ..serving.memory import MemoryGuard
from .adapters import FleetAdapters
from .links import Links, new_session
from .page import add_page
from .passed_on import OwnTokenizer
from .policy import PolicyName
from .pool import EnginePool
from .prefixes import make_prefixes
from .proxy import RouterBackend
from .resolving import Resolve, resolve_all
from .status import ServiceStatus, kv_usage, service_status


class RouterState(BaseModel):
    """State of the router, for probes."""

    status: str


class RouterHealth(RouterState):
    """Whether it lives, and how near it is to the limit of its memory."""

    memory: str


class Router:
    """A router on the running event loop: its Backend, its routes, its pool."""

    def __init__(
        self,
        config: RouterConfig,
        registry: CollectorRegistry,
        in_flight: InFlight,
        *,
        resolve: Resolve = resolve_all,
        credentials: Credentials | None = None,
        tokenizer: OwnTokenizer | None = None,
        memory: MemoryGuard | None = None,
    ) -> None:
        """`resolve` finds engine addresses, which `credentials` are shown to. `tokenizer` None: it is never given
        prompts as text. `memory` is told by probes."""
        self._config = config
        self._memory = MemoryGuard() if memory is None else memory
        self._credentials = credentials
        self._scrapes = Scrapes(registry)
        self._in_flight = in_flight
        self._session = new_session()
        metrics = RouterMetrics(registry, config.model.served_names[0])
        prefixes = make_prefixes(PolicyName(config.policy))
        self._links = Links(credentials)
        self.pool = EnginePool(
            config,
            self._session,
            metrics=metrics,
            resolve=resolve,
            on_gone=self._links.forget,
            prefixes=prefixes,
            credentials=credentials,
            vocabulary="" if tokenizer is None else tokenizer.digest,
        )
        self.adapters = FleetAdapters(self.pool, self._links)
        metrics.kv_usage.set_function(lambda: kv_usage(v for v in self.pool.views() if v.role != "prefill"))
        self.backend = RouterBackend(
            config, self.pool, self._links, metrics=metrics, prefixes=prefixes, tokenizer=tokenizer
        )

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Discovery, for as long as `app` runs."""
        self.pool.start()
        try:
            yield
        finally:
            await self.pool.close()
            await self._links.close()
            await self._session.close()

    def add_metrics(self, app: FastAPI) -> None:
        """Add /info and /metrics, which are not for clients."""
        app.add_api_route("/info", self._info, tags=["probes"])
        app.add_api_route("/metrics", self._metrics, tags=["probes"], response_class=PlainTextResponse)

    def add_probes(self, app: FastAPI) -> None:
        """Add /health, /ping, /ready and /accepting."""
        for path in ("/health", "/ping"):
            app.add_api_route(path, self._health, tags=["probes"], response_model=RouterHealth, responses=errors())
        app.add_api_route("/ready", self._ready, tags=["probes"], response_model=RouterState, responses=errors())
        app.add_api_route(
            "/accepting", self._accepting, tags=["probes"], response_model=RouterState, responses=errors()
        )

    def add_page(self, app: FastAPI, check: Callable[[Request], object], *, show_load: bool) -> None:
        """Add the page at / and /status, which `check` guards. `show_load`: whether the service's load is for every
        client to see."""
        add_page(app, lambda: self._status(show_load), check)

    async def _health(self) -> RouterHealth:
        """Whether this process lives, and what runs in its background does."""
        if self.pool.failure:
            raise Overloaded(f"not healthy: {self.pool.failure}")
        return RouterHealth(status="ok", memory=self._memory.told)

    async def _ready(self) -> RouterState:
        """Whether a prompt could be served now."""
        return self._state(self.backend.ready())

    async def _accepting(self) -> RouterState:
        """Whether clients should be sent here. Readiness of the pod: were it that of the engines, a Service would
        refuse connections in every gap, and clients would learn neither why nor when to come back."""
        return self._state(self.backend.accepting())

    def _state(self, problem: str) -> RouterState:
        unknown = "" if self._credentials is None else self._credentials.problem()
        reason = "draining" if self._in_flight.leaving else unknown or problem
        if reason:
            raise Overloaded(f"not ready: {reason}")
        return RouterState(status="ready")

    def _status(self, show_load: bool) -> ServiceStatus:
        return service_status(
            self.pool.views(),
            self.pool.roles,
            models=self._config.model.served_names,
            version=version("isthmus-runtime"),
            problem="this router is shutting down" if self._in_flight.leaving else self.backend.ready(),
            max_model_len=self.backend.max_model_len,
            show_load=show_load,
        )

    async def _info(self) -> dict[str, Any]:
        """What is known of the engines, and how many requests are held, those that are still read among them."""
        return {
            "role": "router",
            "served_names": list(self._config.model.served_names),
            "version": version("isthmus-runtime"),
            "policy": self._config.policy,
            "max_model_len": self.backend.max_model_len,
            "requests": len(self._in_flight),
            "draining": self._in_flight.leaving,
            "engines": [asdict(s) for s in self.pool.statuses()],
        }

    async def _metrics(self) -> Response:
        """Prometheus text."""
        return Response(await self._scrapes.text(), headers={"Content-Type": CONTENT_TYPE})
