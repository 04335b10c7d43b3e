"""Joins the parts of a router process. Only `__main__` imports it."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from functools import partial
from pathlib import Path

import uvloop
from prometheus_client import CollectorRegistry

from ..checkpoints.provenance import verify_files
from ..config import RouterConfig
from ..credentials import peer_credentials
from ..metrics import MemoryMetrics, RequestMetrics, TenantMetrics
from ..openai.adapters import BODIES as ADAPTER_BODIES
from ..openai.adapters import add_adapter_routes
from ..openai.app import BODIES, ApiConfig, add_openai_routes, read_api_key
from ..openai.keys import Keys
from ..openai.tenants_file import TenantsFile
from ..openai.text_prompts import ids_of_passed_on
from ..openai.tokenizer import Tokenizer
from ..router.app import make_router
from ..router.passed_on import OwnTokenizer
from ..serving.app import add_pages, make_app
from ..serving.in_flight import InFlight
from ..serving.limits import limits_of
from ..serving.memory import MemoryGuard, let_go_of_large_blocks
from ..serving.memory_use import find_limit
from ..serving.server import beside, run_app
from ..structured.checker import Checker
from ..transfer.sockets import probe_accepted
from .open_tracer import open_tracer

log = logging.getLogger(__name__)

_GC_THRESHOLD = 20_000
"""Containers made, less those freed, between two collections; 700 by default."""

_LAME_DUCK_S = 3.0
"""Kubernetes takes an ending pod out of its Service by and by, node by node: a second or two is usual."""


def serve_router(config: RouterConfig) -> int:
    """Run one router until SIGTERM. Raises ConfigError when it cannot start."""
    let_go_of_large_blocks()
    verify_files(Path(config.model.path))
    tokenizer = Tokenizer.load(config.model.path, trusted=config.model.trust_tokenizer)
    tokenizer.prepare()
    api_key = read_api_key(config.api_key_file)
    tenants = TenantsFile(config.tenants_file, time.monotonic()) if config.tenants_file else None
    # What is there now stays, and a request leaves hardly a cycle behind: the collector need not look that often.
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    return uvloop.run(_serve(config, tokenizer, api_key, tenants))


async def _serve(config: RouterConfig, tokenizer: Tokenizer, api_key: str, tenants: TenantsFile | None) -> int:
    in_flight, registry = InFlight(), CollectorRegistry()
    credentials = peer_credentials(config.server.peer_credentials, config.server.host)
    tracer = open_tracer(config.server.tracing, "router", config.model.served_names[0])
    watched = MemoryMetrics(registry, config.model.served_names[0], prefix="isthmus_router_")
    memory = MemoryGuard(find_limit(config.server.memory_limit_bytes, log=log.info), refused=watched.refused)
    watched.level.set_function(lambda: memory.level)
    watched.share.set_function(lambda: memory.share)
    own = OwnTokenizer(tokenizer.digest, partial(ids_of_passed_on, tokenizer), tokenizer.most_letters)
    router = make_router(config, registry, in_flight, credentials=credentials, tokenizer=own, memory=memory)
    metrics = RequestMetrics(registry, config.model.served_names[0], prefix="isthmus_router_")
    app = make_app(
        "Isthmus router",
        bodies=BODIES + ADAPTER_BODIES,
        lifespan=router.lifespan,
        cors_origins=config.cors_origins,
        credentials=credentials,
    )
    grammars = Checker(config.model.path)
    add_openai_routes(
        app,
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
        grammars=grammars,
        tracer=tracer,
        memory=memory,
        adapters=lambda: router.pool.adapters,
        takes_text=router.backend.takes_text,
    )
    keys = Keys(api_key, tenants, time.monotonic)
    if config.lora_updates:
        add_adapter_routes(app, keys.check, router.adapters.change)
    router.add_probes(app)
    if config.page:
        # What is busy tells of other tenants.
        router.add_page(app, keys.check, show_load=tenants is None)
    add_pages(app)
    apart = make_app("Isthmus router: metrics and probes", bodies=()) if config.server.metrics_port else None
    router.add_metrics(app if apart is None else apart)
    if apart is not None:
        router.add_probes(apart)

    def started(port: int) -> None:
        probe_accepted()
        log.info("router listens on %s:%d", config.server.host, port)

    try:
        async with beside(apart, host=config.server.host, port=config.server.metrics_port):
            await run_app(
                app,
                host=config.server.host,
                port=config.server.port,
                drain_timeout_s=config.server.drain_timeout_s,
                lame_duck_s=_LAME_DUCK_S,
                in_flight=in_flight,
                limits=limits_of(config.server),
                memory=memory,
                on_started=started,
            )
    finally:
        await grammars.close()
        await asyncio.to_thread(tracer.close)
    return 0
