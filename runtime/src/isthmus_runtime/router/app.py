"""The router's own routes and its background work. The OpenAI routes are added beside them by `__main__`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict
from importlib.metadata import version

from aiohttp import web
from prometheus_client import CollectorRegistry

from ..config import RouterConfig
from ..errors import Overloaded
from ..httpd import InFlight, error_response, json_response
from ..metrics import CONTENT_TYPE, RouterMetrics, render
from .links import Links, new_session
from .policy import PolicyName
from .pool import Pool, Resolve, resolve_all
from .prefixes import make_prefixes
from .proxy import RouterBackend


class Router:
    """A router on the running event loop: its Backend, its routes, its pool. Made by `make_router`."""

    def __init__(
        self, config: RouterConfig, registry: CollectorRegistry, in_flight: InFlight, resolve: Resolve = resolve_all
    ) -> None:
        self._config = config
        self._registry = registry
        self._in_flight = in_flight
        self._session = new_session()
        metrics = RouterMetrics(registry, config.model.served_names[0])
        prefixes = make_prefixes(PolicyName(config.policy))
        self._links = Links()
        self.pool = Pool(
            config,
            self._session,
            metrics=metrics,
            resolve=resolve,
            on_gone=self._links.forget,
            prefixes=prefixes,
        )
        self.backend = RouterBackend(config, self.pool, self._links, metrics=metrics, prefixes=prefixes)

    def add_routes(self, app: web.Application) -> None:
        """Add /health, /ready, /accepting, /info and /metrics, and run discovery for as long as `app` runs."""
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/accepting", self._accepting)
        app.router.add_get("/info", self._info)
        app.router.add_get("/metrics", self._metrics)
        app.cleanup_ctx.append(self._background)

    async def _background(self, app: web.Application) -> AsyncIterator[None]:
        self.pool.start()
        yield
        await self.pool.close()
        await self._links.close()
        await self._session.close()

    async def _health(self, request: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def _ready(self, request: web.Request) -> web.Response:
        """Whether a prompt could be served now."""
        return self._state(self.backend.ready())

    async def _accepting(self, request: web.Request) -> web.Response:
        """Whether clients should be sent here. Readiness of the pod: were it that of the engines, a Service would
        refuse connections in every gap, and clients would learn neither why nor when to come back."""
        return self._state(self.backend.accepting())

    def _state(self, problem: str) -> web.Response:
        reason = "draining" if self._in_flight.leaving else problem
        return error_response(Overloaded(f"not ready: {reason}")) if reason else json_response({"status": "ready"})

    async def _info(self, request: web.Request) -> web.Response:
        return json_response(
            {
                "role": "router",
                "served_names": list(self._config.model.served_names),
                "version": version("isthmus-runtime"),
                "policy": self._config.policy,
                "max_model_len": self.backend.max_model_len,
                "requests": len(self._in_flight),
                "draining": self._in_flight.leaving,
                "engines": [asdict(s) for s in self.pool.statuses()],
            }
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=render(self._registry), headers={"Content-Type": CONTENT_TYPE})


def make_router(
    config: RouterConfig, registry: CollectorRegistry, in_flight: InFlight, *, resolve: Resolve = resolve_all
) -> Router:
    """A router for `config`. Must be called on the event loop it will run on; `resolve` finds engine addresses."""
    return Router(config, registry, in_flight, resolve)
