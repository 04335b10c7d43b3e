"""Joins an engine and its HTTP side. Only `__main__` imports it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import NoReturn

import uvloop
from prometheus_client import CollectorRegistry

from ..config import EngineConfig, Role
from ..credentials import peer_credentials
from ..engine.backend import EngineBackend
from ..engine.kv_events import KvEventFeed
from ..engine.loop import STOP_S
from ..engine.meters import EngineMeters
from ..engine.seam import AdapterList, Engine, EngineFacts
from ..engine.server import BODIES, EngineServer
from ..engine.streams import Streams
from ..engine.traces import StartTimes
from ..errors import ConfigError, EngineFailed, IsthmusError
from ..openai.adapters import BODIES as ADAPTER_BODIES
from ..openai.adapters import add_adapter_routes
from ..openai.app import BODIES as OPENAI_BODIES
from ..openai.app import ApiConfig, add_openai_routes
from ..openai.text_prompts import ids_of_passed_on
from ..openai.tokenizer import Tokenizer
from ..protocol.info import AdapterInfo, AdapterListInfo, AdapterProblemInfo, EngineInfo, LoadInfo
from ..serving.app import add_pages, make_app
from ..serving.in_flight import InFlight
from ..serving.limits import limits_of
from ..serving.memory import MemoryGuard, let_go_of_large_blocks, share_heaps
from ..serving.memory_use import find_limit
from ..serving.server import beside, check_port, run_app
from ..structured.checker import Checker
from ..transfer.sockets import probe_accepted
from .engine_core import Loaded, load_executor, start_engine
from .engine_process import EngineProcess, check_status
from .open_tracer import open_tracer

log = logging.getLogger(__name__)

_LAME_DUCK_S = 2.0
"""Routers look at /info once a second; until they know, what they send here is served."""
_LEAVE_S = STOP_S + 2.0
"""For an engine process to stop, and to let go of its device and other ranks; then it is killed, which they notice.
With the rest of what `run_app` takes, within the 15 s that pods have after their drain."""
_MOST_PROBLEMS = 65
"""Of adapters, in /info: routers ask for it every second. Metrics count all."""
_END_S = 45.0
"""To let go of them where nothing asked for its end: it broke, or could not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """An engine that runs, here or in its own process."""

    engine: Engine
    facts: EngineFacts
    leave: asyncio.Event | None
    """Set when it is gone, for `run_app` to end; None: it goes with this process."""
    stop: Callable[[], Awaitable[None]]
    pid: int | None = None
    """Of the engine's process; None: it is this one."""


_Open = Callable[[Streams, KvEventFeed | None, StartTimes | None], AbstractAsyncContextManager[_Served]]


def serve_engine(config: EngineConfig, process: EngineProcess | None) -> NoReturn:
    """Run one engine until SIGTERM, then end the process; the engine in `process`, or in this one. Raises ConfigError
    when its model or pool cannot be made."""
    started = time.monotonic()
    if process is None:
        share_heaps()
    else:
        let_go_of_large_blocks()
    check_port(config.server.host, config.server.port)
    if config.server.metrics_port:
        check_port(config.server.host, config.server.metrics_port, "--metrics-port")
    tokenizer = None
    if config.role is Role.UNIFIED:
        tokenizer = Tokenizer.load(config.model.path, trusted=config.model.trust_tokenizer)
    if tokenizer is not None:
        tokenizer.prepare()
    vocabulary = vocabulary_of(config.model.path) if tokenizer is None else tokenizer.digest
    opened = _here(config, load_executor(config)) if process is None else _apart(config, process)
    try:
        status = uvloop.run(_serve(config, opened, tokenizer, vocabulary, started))
        if process is not None:
            check_status(process.end(_END_S))
    except ConfigError as error:
        log.critical("%s", "; ".join(error.problems))
        status = 2
    except IsthmusError as error:
        log.critical("%s", error)
        status = 1
    # Not by the interpreter's own end: see `engine_process`.
    logging.shutdown()
    os._exit(status)


def _here(config: EngineConfig, loaded: Loaded) -> _Open:
    @asynccontextmanager
    async def opened(streams: Streams, feed: KvEventFeed | None, starts: StartTimes | None) -> AsyncIterator[_Served]:
        core = start_engine(
            config,
            loaded,
            streams.sink,
            events=None if feed is None else feed.queue,
            started=None if starts is None else starts.started,
        )

        async def stop() -> None:
            await asyncio.to_thread(core.stop)

        try:
            yield _Served(engine=core.engine, facts=core.facts, leave=None, stop=stop)
        finally:
            core.close()
        if core.engine.loop.failure:
            raise EngineFailed(core.engine.loop.failure)

    return opened


def _apart(config: EngineConfig, process: EngineProcess) -> _Open:
    from ..engine.remote import RemoteEngine

    @asynccontextmanager
    async def opened(streams: Streams, feed: KvEventFeed | None, starts: StartTimes | None) -> AsyncIterator[_Served]:
        engine = RemoteEngine(
            streams,
            silence_s=config.server.no_progress_timeout_s,
            started=None if starts is None else starts.note,
            changed=None if feed is None else feed.take,
        )
        await engine.connect(process.socket)
        try:
            facts = await engine.ready
        except EngineFailed as error:
            check_status(process.end(_END_S))
            raise EngineFailed("the engine process ended before it served") from error
        log.info("engine process %d serves", process.pid)

        async def stop_engine() -> None:
            process.expect_end(_LEAVE_S)
            await engine.stop(STOP_S)

        stop = asyncio.Event()  # signals set it, too
        watch = asyncio.ensure_future(engine.ended.wait())
        watch.add_done_callback(lambda _: stop.set())
        try:
            yield _Served(engine=engine, facts=facts, leave=stop, stop=stop_engine, pid=process.pid)
        finally:
            watch.cancel()
            engine.close()

    return opened


def vocabulary_of(path: str) -> str:
    """Digest of a model's tokenizer, by which routers know what its ids mean; empty for a folder without one."""
    try:
        return Tokenizer.load(path, trusted=True).digest  # no text is tokenised
    except ConfigError as error:
        log.warning("routers cannot tell whether their ids are this model's: %s", error)
        return ""


async def _serve(
    config: EngineConfig, opened: _Open, tokenizer: Tokenizer | None, vocabulary: str, started: float
) -> int:
    loop, traced = asyncio.get_running_loop(), bool(config.server.tracing.endpoint)
    feed = KvEventFeed(loop) if config.kv.prefix_caching else None
    streams = Streams(loop)
    starts = StartTimes(time.monotonic) if traced else None
    async with opened(streams, feed, starts) as served:
        await _serve_ports(config, served, streams, feed, starts, tokenizer, vocabulary, started)
    return 0


async def _serve_ports(
    config: EngineConfig,
    served: _Served,
    streams: Streams,
    feed: KvEventFeed | None,
    starts: StartTimes | None,
    tokenizer: Tokenizer | None,
    vocabulary: str,
    started: float,
) -> None:
    engine, facts, model_name = served.engine, served.facts, config.model.served_names[0]
    kv = facts.kv
    credentials = peer_credentials(config.server.peer_credentials, config.server.host)
    tracer = open_tracer(config.server.tracing, config.role.value, model_name)
    backend = EngineBackend(engine, streams, vocab_size=facts.vocab_size, task=facts.task, starts=starts)
    in_flight = InFlight()
    meters = EngineMeters(CollectorRegistry(), model_name)
    meters.engine.set_cache_config(block_size=str(kv.block_size), num_gpu_blocks=str(kv.physical_blocks))

    def info() -> EngineInfo:
        now = engine.status()
        stats, moved = now.snapshot.stats, now.moved
        return EngineInfo(
            role=config.role.value,  # type: ignore[arg-type]
            model=config.model.path,
            served_names=config.model.served_names,
            fingerprint=facts.fingerprint,
            kv=kv,
            transfer=facts.transfer,
            version=version("isthmus-runtime"),
            running=stats.running,
            waiting=stats.waiting + stats.receiving,
            load=LoadInfo(
                kv_usage=now.snapshot.kv_usage,
                generated_tokens=backend.generated_tokens,
                sent_bytes=0 if moved is None else moved.sent_bytes,
            ),
            draining=in_flight.leaving,
            adapters=tuple(AdapterInfo(name=adapter.name, digest=adapter.digest) for adapter in now.adapters),
            adapter_list=None if now.adapter_list is None else _told(now.adapter_list),
            vocab_size=facts.vocab_size,
            task=facts.task,
            rank_sums=facts.rank_sums,
            model_revision=facts.model_revision,
            tokenizer="" if tokenizer is None else tokenizer.digest,
            vocabulary=vocabulary,
            begins_early=True,
        )

    memory = _memory(config, served, meters)
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
        letters=len if tokenizer is None else tokenizer.most_letters,
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
            backend,
            tokenizer,
            ApiConfig(served_names=config.model.served_names, chat=config.chat),
            in_flight=in_flight,
            metrics=meters.requests,
            grammars=checker,
            tracer=tracer,
            memory=memory,
            adapters=lambda: {adapter.name: adapter for adapter in engine.status().adapters},
        )
        if config.lora.folder and credentials is None:
            # Where peers know each other, changes come from the router by /internal/adapter: these ask for no key.
            add_adapter_routes(app, lambda request: None, engine.change_adapter)
    server.add_probes(app)  # routers ask here, too
    server.add_internal(app)
    add_pages(app)
    apart = make_app("Isthmus engine: metrics and probes", bodies=()) if config.server.metrics_port else None
    server.add_metrics(app if apart is None else apart)
    if apart is not None:
        server.add_probes(apart)

    async def end() -> None:
        # The transfer ends while the port still answers: to a peer, a refused connection means that nothing can move.
        await served.stop()
        if feed is not None:
            feed.close()

    def on_started(port: int) -> None:
        probe_accepted()
        log.info("ready on port %d after %.1f s", port, time.monotonic() - started)

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
                stop=served.leave,
                before_close=end,
                on_started=on_started,
            )
    finally:
        await checker.close()
        await asyncio.to_thread(tracer.close)


def _memory(config: EngineConfig, served: _Served, meters: EngineMeters) -> MemoryGuard:
    """Watches this process and the one of the engine, which share a limit."""
    use = find_limit(config.server.memory_limit_bytes, log=log.info)
    if use is not None and served.pid is not None:
        use.add(served.pid)
    reserved = served.facts.host_pool_bytes
    if config.transfer.mode == "store":
        reserved += config.transfer.store.segment_bytes
    if config.lora.max_loras:
        reserved += config.lora.memory_bytes
    guard = MemoryGuard(use, reserved=reserved, refused=meters.memory.refused, trim_others=served.engine.trim)
    meters.memory.level.set_function(lambda: guard.level)
    meters.memory.share.set_function(lambda: guard.share)
    return guard


def _told(found: AdapterList) -> AdapterListInfo:
    problems = tuple(AdapterProblemInfo(name=one.name, problem=one.problem) for one in found.problems[:_MOST_PROBLEMS])
    return AdapterListInfo(digest=found.digest, listed=found.listed, problems=problems)
