"""Joins the parts of an engine process. Only `__main__` imports it.

weights -> KV plan -> executor -> scheduler -> transfer -> loop -> HTTP
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import uvloop
from prometheus_client import CollectorRegistry

from ..checkpoints.provenance import pinned_revision, verify_files
from ..config import EngineConfig, Role
from ..credentials import Credentials, peer_credentials
from ..engine.backend import EngineBackend, Streams
from ..engine.kv_events import KvEventFeed
from ..engine.long_lived import LongLived
from ..engine.loop import EngineLoop
from ..engine.scheduler import Scheduler
from ..engine.server import BODIES, EngineMeters, EngineServer
from ..engine.traces import StartTimes
from ..errors import ConfigError, EngineFailed, IsthmusError
from ..interfaces.handoff import HandoffEvent, KvHandoff
from ..interfaces.steps import Executor
from ..kv.groups import LayerSpec
from ..kv.keys import layout_digest, pool_name
from ..kv.plan import KvPlan
from ..kv.pool import BlockPool
from ..openai.app import BODIES as OPENAI_BODIES
from ..openai.app import ApiConfig, add_openai_routes
from ..openai.tokenizer import Tokenizer
from ..protocol import KV_ABI, EngineInfo, KvInfo, LoadInfo, TransferInfo
from ..request import GENERATES, ServedTask
from ..serving.app import add_pages, make_app
from ..serving.in_flight import InFlight
from ..serving.limits import limits_of
from ..serving.server import beside, check_port, run_app
from ..structured.checker import Checker
from ..structured.grammars import Grammars
from ..transfer.sockets import probe_accepted
from .open_tracer import open_tracer
from .pool_plan import plan_pool

log = logging.getLogger(__name__)

_LAME_DUCK_S = 2.0
"""Routers look at /info once a second; until they know, what they send here is served."""

PREPARE_TIMEOUT_S = 30.0
"""Registering the pool and reaching the store's master may take this long at start."""

HandoffFactory = Callable[[Callable[[HandoffEvent], None]], KvHandoff]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """An executor with its pool, and what peers must agree on."""

    executor: Executor
    plan: KvPlan
    digest: str
    kv_heads: int
    vocab_size: int
    task: ServedTask = GENERATES
    takes_hits: bool = True
    """False: every state of a prompt counts, so none is left out for a prefix hit."""


def serve_engine(config: EngineConfig) -> NoReturn:
    """Run one engine until SIGTERM, then end the process. Raises ConfigError when its model or pool cannot be made."""
    started = time.monotonic()
    check_port(config.server.host, config.server.port)
    if config.server.metrics_port:
        check_port(config.server.host, config.server.metrics_port, "--metrics-port")
    verify_files(Path(config.model.path))
    tokenizer = Tokenizer.load(config.model.path) if config.role is Role.UNIFIED else None
    loaded = _load_fake(config) if config.executor == "fake" else _load_torch(config)
    kv = loaded.plan
    log.info(
        "KV pool: %d blocks (%d usable) of %d tokens, %.1f MiB; max_model_len %d",
        kv.num_blocks,
        kv.usable_blocks,
        kv.block_size,
        kv.num_blocks * kv.bytes_per_block / 2**20,
        kv.max_model_len,
    )
    try:
        status = uvloop.run(_serve(config, loaded, tokenizer, started))
    except ConfigError as error:
        log.critical("%s", "; ".join(error.problems))
        status = 2
    except IsthmusError as error:
        log.critical("%s", error)
        status = 1
    if any(thread.name.startswith("transfer-") for thread in threading.enumerate()):
        log.warning("a call into the KV transport has not returned; leaving without it")
    # Everything of ours is closed. Finalising the interpreter would end the process by a signal where such a call
    # still runs, and run Mooncake's exit handlers, which call a master that is gone for most of a minute.
    logging.shutdown()
    os._exit(status)


def _load_torch(config: EngineConfig) -> _Loaded:
    from ..checkpoints.revision import weights_revision
    from ..models.pooling import read_task
    from .ranks import load_engine

    served = read_task(config.model.path, config.model.task)
    task = served.task
    if task.kind != "generate" and config.role is not Role.UNIFIED:
        raise ConfigError(
            f"--model {config.model.path} is an embedding model, which --role {config.role.value} cannot serve: its "
            "prompts have no KV to hand over; use --role unified (mode Unified of a resource), or --task generate"
        )
    loaded = load_engine(config)
    model, kv = loaded.model, loaded.plan
    specs = model.layer_specs(config.kv.block_size, config.kv.dtype)
    digest = layout_digest(
        model_revision=weights_revision(config.model.path),
        dtype=specs[0].dtype,
        block_size=kv.block_size,
        num_kv_heads=model.spec.num_kv_heads,
        head_dim=model.spec.head_dim,
        num_layers=model.spec.num_layers,
        layout=config.kv.layout,
        details=[*(repr(spec) for spec in specs), *model.kv_variants],
    )
    return _Loaded(
        executor=loaded.executor,
        plan=kv,
        digest=digest,
        kv_heads=model.spec.num_kv_heads,
        vocab_size=model.spec.vocab_size,
        task=task,
        takes_hits=served.pooling is None or not served.pooling.needs_every_state,
    )


def _load_fake(config: EngineConfig) -> _Loaded:
    from ..executor.fake import DIMENSIONS, ENTRY_BYTES, MAX_TOKEN_IDS, FakeExecutor

    # One head of width 1 in fp32, keys and values, takes as many bytes as a fake entry.
    spec = LayerSpec(kind="full", layers=1, block_size=config.kv.block_size, dtype="fp32", kv_heads=1, head_dim=1)
    assert spec.page_bytes == config.kv.block_size * ENTRY_BYTES
    memory = config.kv.memory_bytes
    available = int((1 << 24) * config.kv.memory_fraction) if memory is None else memory
    kv = plan_pool(config, (spec,), (available,), 8192)
    digest = layout_digest(
        model_revision=config.model.path,
        dtype="fake",
        block_size=kv.block_size,
        num_kv_heads=1,
        head_dim=1,
        num_layers=1,
        layout=config.kv.layout,
    )
    executor = FakeExecutor(kv.num_blocks, kv.block_size, layout_digest=digest)
    embeds, scores = ServedTask(kind="embed", dimensions=DIMENSIONS, shorter=True), ServedTask(kind="score")
    task = {"embed": embeds, "score": scores}.get(config.model.task, GENERATES)
    return _Loaded(executor=executor, plan=kv, digest=digest, kv_heads=1, vocab_size=MAX_TOKEN_IDS, task=task)


async def _serve(config: EngineConfig, loaded: _Loaded, tokenizer: Tokenizer | None, started: float) -> int:
    kv, model_name = loaded.plan, config.model.served_names[0]
    caches = config.kv.prefix_caching and loaded.takes_hits
    feed = KvEventFeed(asyncio.get_running_loop()) if caches else None
    events = None if feed is None else feed.queue
    scheduler = Scheduler(
        config.scheduler,
        kv,
        BlockPool(kv.num_blocks, num_groups=len(kv.groups), prefix_caching=caches, events=events),
        layout_digest=loaded.digest,
        kv_heads=loaded.kv_heads,
        recompute=config.transfer.on_failure == "recompute",
        late_masks=config.tensor_parallel_size == 1,
    )
    streams = Streams(asyncio.get_running_loop())
    credentials = peer_credentials(config.server.peer_credentials, config.server.host)
    mover = _Mover.start(config, loaded, credentials)
    tracer = open_tracer(config.server.tracing, config.role.value, model_name)
    starts = StartTimes(time.monotonic) if config.server.tracing.endpoint else None
    engine = EngineLoop(
        scheduler,
        loaded.executor,
        streams.sink,
        handoff=mover.handoff,
        step_timeout_s=config.server.no_progress_timeout_s,
        started=None if starts is None else starts.started,
    )
    grammars = None if config.executor == "fake" else cache(lambda: _grammars(config.model.path, loaded.vocab_size))
    backend = EngineBackend(
        engine, streams, vocab_size=loaded.vocab_size, task=loaded.task, grammars=grammars, starts=starts
    )
    in_flight = InFlight()
    meters = EngineMeters(CollectorRegistry(), model_name)
    meters.engine.set_cache_config(block_size=str(kv.block_size), num_gpu_blocks=str(kv.num_blocks))
    kv_info = KvInfo(
        block_size=kv.block_size,
        physical_blocks=kv.num_blocks,
        usable_blocks=kv.usable_blocks,
        bytes_per_block=kv.bytes_per_block,
        max_model_len=kv.max_model_len,
        layout_digest=loaded.digest,
    )
    revision = pinned_revision(Path(config.model.path))
    fingerprint = sha256(f"{loaded.digest}:{KV_ABI}:{mover.shares}".encode()).hexdigest()[:16]

    def info() -> EngineInfo:
        snapshot, moved = engine.snapshot, engine.handoff_stats()
        stats = snapshot.stats
        return EngineInfo(
            role=config.role.value,  # type: ignore[arg-type]
            model=config.model.path,
            served_names=config.model.served_names,
            fingerprint=fingerprint,
            kv=kv_info,
            transfer=mover.info,
            version=version("isthmus-runtime"),
            running=stats.running,
            waiting=stats.waiting + stats.receiving,
            load=LoadInfo(
                kv_usage=snapshot.kv_usage,
                generated_tokens=backend.generated_tokens,
                sent_bytes=0 if moved is None else moved.sent_bytes,
            ),
            draining=in_flight.leaving,
            vocab_size=loaded.vocab_size,
            task=loaded.task,
            model_revision=revision,
        )

    engine.start()
    server = EngineServer(
        backend,
        info,
        meters,
        in_flight,
        no_progress_timeout_s=config.server.no_progress_timeout_s,
        clock=time.monotonic,
        kv_events=feed,
        threads=LongLived(),
        credentials=credentials,
        tracer=tracer,
    )
    app = make_app(
        f"Isthmus {config.role.value} engine",
        bodies=BODIES if tokenizer is None else BODIES + OPENAI_BODIES,
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
        )
    server.add_probes(app)  # routers ask here, too
    server.add_internal(app)
    add_pages(app)
    apart = make_app("Isthmus engine: metrics and probes", bodies=()) if config.server.metrics_port else None
    server.add_metrics(app if apart is None else apart)
    if apart is not None:
        server.add_probes(apart)

    async def end() -> None:
        # The transfer ends while the port still answers: to a peer, a refused connection means that nothing can move.
        await asyncio.to_thread(engine.stop)
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
                before_close=end,
                on_started=on_started,
            )
    finally:
        await checker.close()
        loaded.executor.close()
        await asyncio.to_thread(tracer.close)
    if engine.failure:
        raise EngineFailed(engine.failure)
    return 0


def _grammars(model: str, vocab_size: int) -> Grammars:
    return Grammars.load(model, eos_token_ids=Tokenizer.load(model).eos_token_ids, vocab_size=vocab_size)


class _Mover:
    """The transfer side of an engine, or its absence."""

    def __init__(self, info: TransferInfo, handoff: HandoffFactory | None = None, shares: str = "") -> None:
        """`shares`: equal for engines that find each other's values in a pool."""
        self.info = info
        self.handoff = handoff
        self.shares = shares

    @staticmethod
    def start(config: EngineConfig, loaded: _Loaded, credentials: Credentials | None) -> _Mover:
        """Register the pool with the transport, measure it, and offer the agent to the loop."""
        if config.transfer.mode == "none":
            return _Mover(TransferInfo(epoch=uuid.uuid4().hex))
        from ..transfer.agent import TransferAgent
        from ..transfer.factory import make_transfer, store_secret

        memory = replace(loaded.executor.kv_region(), layout_digest=loaded.digest)
        settings = config.transfer
        if settings.mode == "direct" and memory.device == "cpu":
            # Within 0.4 % of the CPU time of a prompt, which is nothing beside a wrong answer.
            settings = replace(settings, verify_crc=True)
        epoch = uuid.uuid4().hex
        secret = store_secret(settings.store)
        transfer = make_transfer(settings, epoch=epoch, credentials=credentials, secret=secret)
        transfer.prepare(memory, PREPARE_TIMEOUT_S)
        effective = transfer.effective()
        log.info("KV transfer: %s over %s, %.2f GB/s", config.transfer.mode, effective.transport, effective.gbps)
        info = TransferInfo(
            mode=config.transfer.mode,  # type: ignore[arg-type]
            transport=effective.transport,
            probed_gbps=round(effective.gbps, 3),
            epoch=epoch,
        )

        def handoff(notify: Callable[[HandoffEvent], None]) -> KvHandoff:
            return TransferAgent(transfer, memory, settings, notify, time.monotonic, epoch=info.epoch)

        return _Mover(info, handoff, pool_name(secret, "fingerprint") if secret else "")
