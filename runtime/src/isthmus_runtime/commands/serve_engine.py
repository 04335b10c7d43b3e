"""Joins the parts of an engine's HTTP side. Only `__main__` imports it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from functools import partial
from typing import NoReturn

import uvloop
from prometheus_client import CollectorRegistry

from ..collecting import spare_collector
from ..config import EngineConfig, Role
from ..credentials import peer_credentials
from ..engine.backend import EngineBackend
from ..engine.kv_events import KvEventFeed
from ..engine.meters import EngineMeters
from ..engine.server import BODIES, EngineServer
from ..engine.streams import Streams
from ..engine.traces import StartTimes
from ..errors import ConfigError, IsthmusError
from ..heap import map_large_blocks, share_heaps
from ..openai.adapters import BODIES as ADAPTER_BODIES
from ..openai.adapters import add_adapter_routes
from ..openai.app import BODIES as OPENAI_BODIES
from ..openai.app import ApiConfig, OpenAiApi, add_openai_routes
from ..openai.text_prompts import ids_of_passed_on
from ..openai.tokenizer import Tokenizer
from ..protocol.info import EngineInfo
from ..serving.app import make_app
from ..serving.in_flight import InFlight
from ..serving.memory import MemoryGuard
from ..serving.memory_use import find_limit
from ..serving.server import check_port
from ..structured.checker import Checker
from .engine_core import load_executor
from .engine_info import engine_info
from .engine_process import EngineProcess, check_status
from .open_tracer import open_tracer
from .opened_engine import END_S, OpenEngine, RunningEngine, apart, here
from .serve_ports import serve_ports

log = logging.getLogger(__name__)

_LAME_DUCK_S = 2.0
"""Routers look at /info once a second; until they know, what they send here is served."""


def serve_engine(config: EngineConfig, process: EngineProcess | None) -> NoReturn:
    """Run one engine until SIGTERM, then end the process; the engine in `process`, or in this one. Raises ConfigError
    when its model or pool cannot be made."""
    started = time.monotonic()
    if process is None:
        share_heaps()
    else:
        map_large_blocks()
    check_port(config.server.host, config.server.port)
    if config.server.metrics_port:
        check_port(config.server.host, config.server.metrics_port, "--metrics-port")
    tokenizer = None
    if config.role is Role.UNIFIED:
        tokenizer = Tokenizer.load(config.model.path, trusted=config.model.trust_tokenizer)
    if tokenizer is not None:
        tokenizer.prepare()
    vocabulary = vocabulary_of(config.model.path) if tokenizer is None else tokenizer.digest
    open_engine = here(config, load_executor(config)) if process is None else apart(config, process)
    try:
        status = uvloop.run(_serve(config, open_engine, tokenizer, vocabulary, started))
        if process is not None:
            check_status(process.end(END_S))
    except ConfigError as error:
        log.critical("%s", "; ".join(error.problems))
        status = 2
    except IsthmusError as error:
        log.critical("%s", error)
        status = 1
    # Not by the interpreter's own end: see `engine_process`.
    logging.shutdown()
    os._exit(status)


def vocabulary_of(path: str) -> str:
    """Digest of a model's tokenizer, by which routers know what its ids mean; empty for a folder without one."""
    try:
        return Tokenizer.load(path, trusted=True).digest  # no text is tokenised
    except ConfigError as error:
        log.warning("routers cannot tell whether their ids are this model's: %s", error)
        return ""


async def _serve(
    config: EngineConfig, open_engine: OpenEngine, tokenizer: Tokenizer | None, vocabulary: str, started: float
) -> int:
    loop = asyncio.get_running_loop()
    feed = KvEventFeed(loop) if config.kv.prefix_caching else None
    streams = Streams(loop)
    starts = StartTimes(time.monotonic) if config.server.tracing.endpoint else None
    async with open_engine(streams, feed, starts) as running:
        facts = running.facts
        backend = EngineBackend(running.engine, streams, vocab_size=facts.vocab_size, task=facts.task, starts=starts)
        await _serve_http(config, running, backend, feed, tokenizer, vocabulary, started)
    return 0


async def _serve_http(
    config: EngineConfig,
    running: RunningEngine,
    backend: EngineBackend,
    feed: KvEventFeed | None,
    tokenizer: Tokenizer | None,
    vocabulary: str,
    started: float,
) -> None:
    engine, facts, model_name = running.engine, running.facts, config.model.served_names[0]
    credentials = peer_credentials(config.server.peer_credentials, config.server.host)
    tracer = open_tracer(config.server.tracing, config.role.value, model_name)
    in_flight = InFlight()
    meters = EngineMeters(CollectorRegistry(), model_name)
    meters.engine.set_cache_config(block_size=str(facts.kv.block_size), num_gpu_blocks=str(facts.kv.physical_blocks))
    memory = _memory(config, running, meters)
    if tokenizer is not None:
        tokenizer.long_texts.memory = memory

    def info() -> EngineInfo:
        return engine_info(
            config,
            facts,
            engine.status(),
            generated_tokens=backend.generated_tokens,
            draining=in_flight.leaving,
            tokenizer="" if tokenizer is None else tokenizer.digest,
            vocabulary=vocabulary,
        )

    server = EngineServer(
        backend,
        info,
        meters,
        in_flight,
        no_progress_timeout_s=config.server.no_progress_timeout_s,
        clock=time.monotonic,
        kv_events=feed,
        credentials=credentials,
        tracer=tracer,
        tokenise=None if tokenizer is None else partial(ids_of_passed_on, tokenizer),
        memory=memory,
    )
    app = make_app(
        f"Isthmus {config.role.value} engine",
        bodies=BODIES if tokenizer is None else BODIES + OPENAI_BODIES + ADAPTER_BODIES,
        credentials=credentials,
    )
    checker = Checker(config.model.path)
    if tokenizer is not None:
        add_openai_routes(
            app,
            OpenAiApi(
                backend,
                tokenizer,
                ApiConfig(served_names=config.model.served_names, chat=config.chat),
                in_flight=in_flight,
                metrics=meters.requests,
                grammars=checker,
                tracer=tracer,
                memory=memory,
                adapters=lambda: {adapter.name: adapter for adapter in engine.status().adapters},
            ),
        )
        if config.lora.folder and credentials is None:
            # Where peers know each other, changes come from the router by /internal/adapter: these ask for no key.
            add_adapter_routes(app, lambda request: None, engine.change_adapter)
    server.add_probes(app)  # routers ask here, too
    server.add_internal(app)

    async def before_close() -> None:
        # The transfer ends while the port still answers: to a peer, a refused connection means that nothing can move.
        await running.stop()
        if feed is not None:
            feed.close()

    spare_collector()
    await serve_ports(
        app,
        server,
        config.server,
        role="engine",
        lame_duck_s=_LAME_DUCK_S,
        in_flight=in_flight,
        memory=memory,
        checker=checker,
        tracer=tracer,
        on_started=lambda port: log.info("ready on port %d after %.1f s", port, time.monotonic() - started),
        stop=running.gone,
        before_close=before_close,
    )


def _memory(config: EngineConfig, running: RunningEngine, meters: EngineMeters) -> MemoryGuard:
    """Watches this process and the one of the engine, which share a limit."""
    use = find_limit(config.server.memory_limit_bytes, log=log.info)
    if use is not None and running.pid is not None:
        use.add(running.pid)
    reserved = running.facts.host_pool_bytes
    if config.transfer.mode == "store":
        reserved += config.transfer.store.segment_bytes
    if config.lora.max_loras:
        reserved += config.lora.memory_bytes
    guard = MemoryGuard(use, reserved=reserved, refused=meters.memory.refused, trim_others=running.engine.trim)
    meters.memory.level.set_function(lambda: guard.level)
    meters.memory.share.set_function(lambda: guard.share)
    return guard
