"""Joins the parts of a router process. Only `__main__` imports it."""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path

import uvloop
from prometheus_client import CollectorRegistry

from ..checkpoints.provenance import verify_files
from ..collecting import spare_collector
from ..config import RouterConfig
from ..credentials import peer_credentials
from ..heap import map_large_blocks
from ..metrics import MemoryMetrics, RequestMetrics, TenantMetrics
from ..openai.adapters import BODIES as ADAPTER_BODIES
from ..openai.adapters import add_adapter_routes
from ..openai.app import BODIES, ApiConfig, OpenAiApi, add_openai_routes, read_api_key
from ..openai.keys import Keys
from ..openai.tenants_file import TenantsFile
from ..openai.text_prompts import ids_of_passed_on
from ..openai.tokenizer import Tokenizer
from ..router.app import Router
from ..router.passed_on import OwnTokenizer
from ..serving.app import make_app
from ..serving.in_flight import InFlight
from ..serving.memory import MemoryGuard
from ..serving.memory_use import find_limit
from ..structured.checker import Checker
from .open_tracer import open_tracer
from .serve_ports import serve_ports

log = logging.getLogger(__name__)

_LAME_DUCK_S = 3.0
"""Kubernetes takes an ending pod out of its Service by and by, node by node: a second or two is usual."""


def serve_router(config: RouterConfig) -> int:
    """Run one router until SIGTERM. Raises ConfigError when it cannot start."""
    map_large_blocks()
    verify_files(Path(config.model.path))
    tokenizer = Tokenizer.load(config.model.path, trusted=config.model.trust_tokenizer)
    tokenizer.prepare()
    api_key = read_api_key(config.api_key_file)
    tenants = TenantsFile(config.tenants_file, time.monotonic()) if config.tenants_file else None
    spare_collector()
    return uvloop.run(_serve(config, tokenizer, api_key, tenants))


async def _serve(config: RouterConfig, tokenizer: Tokenizer, api_key: str, tenants: TenantsFile | None) -> int:
    in_flight, registry = InFlight(), CollectorRegistry()
    credentials = peer_credentials(config.server.peer_credentials, config.server.host)
    tracer = open_tracer(config.server.tracing, "router", config.model.served_names[0])
    watched = MemoryMetrics(registry, config.model.served_names[0], prefix="isthmus_router_")
    memory = MemoryGuard(find_limit(config.server.memory_limit_bytes, log=log.info), refused=watched.refused)
    watched.level.set_function(lambda: memory.level)
    watched.share.set_function(lambda: memory.share)
    own = OwnTokenizer(tokenizer.digest, partial(ids_of_passed_on, tokenizer))
    router = Router(config, registry, in_flight, credentials=credentials, tokenizer=own, memory=memory)
    metrics = RequestMetrics(registry, config.model.served_names[0], prefix="isthmus_router_")
    app = make_app(
        "Isthmus router",
        bodies=BODIES + ADAPTER_BODIES,
        lifespan=router.lifespan,
        cors_origins=config.cors_origins,
        credentials=credentials,
    )
    checker = Checker(config.model.path)
    add_openai_routes(
        app,
        OpenAiApi(
            router.backend,
            tokenizer,
            ApiConfig(
                served_names=config.model.served_names,
                chat=config.chat,
                request_timeout_s=config.request_timeout_s,
                api_key=api_key,
                tenants=tenants,
            ),
            in_flight=in_flight,
            metrics=metrics,
            tenant_metrics=None if tenants is None else TenantMetrics(registry, config.model.served_names[0]),
            grammars=checker,
            tracer=tracer,
            memory=memory,
            adapters=lambda: router.pool.adapters,
            takes_text=router.backend.takes_text,
        ),
    )
    keys = Keys(api_key, tenants, time.monotonic)
    if config.lora_updates:
        add_adapter_routes(app, keys.check, router.adapters.change)
    router.add_probes(app)
    if config.page:
        # What is busy tells of other tenants.
        router.add_page(app, keys.check, show_load=tenants is None)
    await serve_ports(
        app,
        router,
        config.server,
        role="router",
        lame_duck_s=_LAME_DUCK_S,
        in_flight=in_flight,
        memory=memory,
        checker=checker,
        tracer=tracer,
        on_started=lambda port: log.info("router listens on %s:%d", config.server.host, port),
    )
    return 0
