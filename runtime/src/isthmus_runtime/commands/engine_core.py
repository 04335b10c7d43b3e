"""Joins the parts of an engine but for its HTTP side, in the process that serves or in one of its own.

weights -> KV plan -> executor -> scheduler -> transfer -> loop
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoints.provenance import pinned_revision, verify_files
from ..config import EngineConfig, Role
from ..credentials import Credentials, peer_credentials
from ..engine.adapter_file import AdapterFileThread, ListedAdapters
from ..engine.adapter_registry import AdapterRegistry
from ..engine.exchange import Sink
from ..engine.local import LocalEngine
from ..engine.long_lived import LongLived
from ..engine.loop import EngineLoop
from ..engine.scheduler import Scheduler
from ..engine.seam import EngineFacts
from ..errors import ConfigError, InvalidRequest
from ..interfaces.handoff import HandoffEvent, KvHandoff
from ..interfaces.steps import AdapterHolder, Executor, RowStart
from ..kv.groups import LayerSpec
from ..kv.keys import layout_digest, pool_name
from ..kv.plan import KvPlan
from ..kv.pool import BlockPool
from ..kv.prefix import BlockEvent
from ..openai.tokenizer import Tokenizer
from ..protocol.info import KvInfo, TransferInfo
from ..request import GENERATES, ServedTask
from ..structured.grammars import Grammars
from .pool_plan import plan_pool

if TYPE_CHECKING:
    from ..transfer.other_ranks import OtherRank
    from .draft_model import Drafts

log = logging.getLogger(__name__)

PREPARE_TIMEOUT_S = 30.0
"""Registering the pool and reaching the store's master may take this long at start."""

HandoffFactory = Callable[[Callable[[HandoffEvent], None]], KvHandoff]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """An executor with its pool, and what peers must agree on."""

    executor: Executor
    plan: KvPlan
    digest: str
    kv_heads: int
    vocab_size: int
    adapters: AdapterHolder | None
    task: ServedTask = GENERATES
    takes_hits: bool = True
    """False: every state of a prompt counts, so none is left out for a prefix hit."""
    drafts: Drafts | None = None
    """Of a draft model."""
    rank_sums: str = ""
    """How its ranks sum; empty: there is one."""
    other_ranks: Sequence[OtherRank] = ()
    """What moves the KV of ranks 1 and up, in Direct mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCore:
    """An engine that runs."""

    engine: LocalEngine
    facts: EngineFacts
    executor: Executor
    drafts: Drafts | None = None
    adapter_file: AdapterFileThread | None = None

    def stop(self) -> None:
        """End all requests and transfers. Peers may still ask what is drained."""
        if self.adapter_file is not None:
            self.adapter_file.stop()
        self.engine.loop.stop()

    def close(self) -> None:
        """After `stop`: give back the device."""
        self.executor.close()
        if self.drafts is not None:
            self.drafts.executor.close()
        if any(thread.name.startswith("transfer-") for thread in threading.enumerate()):
            log.warning("a call into the KV transport has not returned; leaving without it")


def load_executor(config: EngineConfig) -> Loaded:
    """Weights, pool and what computes with them: the long part of a start. Raises ConfigError where that cannot be."""
    verify_files(Path(config.model.path))
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
    return loaded


def start_engine(
    config: EngineConfig,
    loaded: Loaded,
    sink: Sink,
    *,
    events: deque[BlockEvent] | None,
    started: Callable[[Sequence[RowStart]], None] | None,
    left: Callable[[float], object] = lambda timeout_s: None,
) -> EngineCore:
    """Start the engine's threads. Raises ConfigError where peers or a pool cannot be reached.

    `sink`, `started` and `left`: of `EngineLoop`. `events`: where the block pool puts changes of its prefix cache.
    """
    kv, caches = loaded.plan, config.kv.prefix_caching and loaded.takes_hits
    draft_model = None if loaded.drafts is None else loaded.drafts.model
    scheduler = Scheduler(
        config.scheduler,
        kv,
        BlockPool(kv.num_blocks, num_groups=len(kv.groups), prefix_caching=caches, events=events),
        layout_digest=loaded.digest,
        kv_heads=loaded.kv_heads,
        recompute=config.transfer.on_failure == "recompute",
        fetches=config.transfer.mode == "store" and config.transfer.store.reads,
        late_masks=config.tensor_parallel_size == 1,
        max_loras=config.lora.max_loras,
        draft_model=draft_model,
    )
    mover = _Mover.start(config, loaded, peer_credentials(config.server.peer_credentials, config.server.host))
    loop = EngineLoop(
        scheduler,
        loaded.executor,
        sink,
        handoff=mover.handoff,
        step_timeout_s=config.server.no_progress_timeout_s,
        started=started,
        adapters=loaded.adapters,
        draft_model=draft_model,
        left=left,
    )
    adapters = AdapterRegistry(
        loop,
        loaded.adapters,
        taken=config.model.served_names,
        folder=config.lora.folder,
        memory_bytes=config.lora.memory_bytes,
    )
    _load_adapters(adapters, config)
    listed = _listed_adapters(adapters, config)
    adapter_file = None if listed is None else AdapterFileThread(listed, time.monotonic)
    grammars = None if config.executor == "fake" else cache(lambda: _grammars(config.model.path, loaded.vocab_size))
    facts = _facts(config, loaded, mover)
    loop.start()
    if adapter_file is not None:
        adapter_file.start()
    engine = LocalEngine(loop, sink, grammars=grammars, threads=LongLived(), adapters=adapters, listed=listed)
    return EngineCore(
        engine=engine, facts=facts, executor=loaded.executor, drafts=loaded.drafts, adapter_file=adapter_file
    )


def _facts(config: EngineConfig, loaded: Loaded, mover: _Mover) -> EngineFacts:
    kv = loaded.plan
    return EngineFacts(
        kv=KvInfo(
            block_size=kv.block_size,
            physical_blocks=kv.num_blocks,
            usable_blocks=kv.usable_blocks,
            bytes_per_block=kv.bytes_per_block,
            max_model_len=kv.max_model_len,
            layout_digest=loaded.digest,
        ),
        transfer=mover.info,
        fingerprint=sha256(f"{loaded.digest}:{mover.shares}".encode()).hexdigest()[:16],
        vocab_size=loaded.vocab_size,
        model_revision=pinned_revision(Path(config.model.path)),
        task=loaded.task,
        host_pool_bytes=kv.num_blocks * kv.bytes_per_block if loaded.executor.kv_region().device == "cpu" else 0,
        rank_sums=loaded.rank_sums,
    )


def _load_torch(config: EngineConfig) -> Loaded:
    from ..checkpoints.revision import weights_revision
    from ..models.pooling import read_task
    from .draft_model import load_drafts
    from .ranks import load_engine

    served = read_task(config.model.path, config.model.task)
    if served.task.kind != "generate" and config.role is not Role.UNIFIED:
        raise ConfigError(
            f"--model {config.model.path} is an embedding model, which --role {config.role.value} cannot serve: its "
            "prompts have no KV to hand over; use --role unified (mode Unified of a resource), or --task generate"
        )
    drafts = None
    if config.draft_model:
        if served.pooling is not None:
            raise ConfigError(f"--task embed draws no tokens that a draft model ({config.draft_model}) could guess")
        limit = config.scheduler.max_model_len
        path = Path(config.draft_model)
        drafts = load_drafts(path, config.model, block_size=config.kv.block_size, max_model_len=limit)
    loaded = load_engine(config)
    model, kv = loaded.model, loaded.plan
    specs = model.layer_specs(config.kv.block_size, config.kv.dtype)
    ranks = [f"{config.tensor_parallel_size} ranks"] if config.tensor_parallel_size > 1 else []
    digest = layout_digest(
        model_revision=weights_revision(config.model.path),
        dtype=specs[0].dtype,
        block_size=kv.block_size,
        num_kv_heads=model.spec.num_kv_heads,
        head_dim=model.spec.head_dim,
        num_layers=model.spec.num_layers,
        layout=config.kv.layout,
        details=[*(repr(spec) for spec in specs), *model.kv_variants, *ranks],
    )
    return Loaded(
        executor=loaded.executor,
        plan=kv,
        digest=digest,
        kv_heads=model.spec.num_kv_heads,
        vocab_size=model.spec.vocab_size,
        adapters=loaded.adapters,
        task=served.task,
        takes_hits=served.pooling is None or not served.pooling.needs_every_state,
        drafts=drafts,
        rank_sums=loaded.rank_sums,
        other_ranks=loaded.other_ranks,
    )


def _load_fake(config: EngineConfig) -> Loaded:
    from ..executor.fake import DIMENSIONS, ENTRY_BYTES, MAX_TOKEN_IDS, FakeExecutor

    # One head of width 1 in fp32, keys and values, takes as many bytes as a fake entry.
    spec = LayerSpec(kind="full", layers=1, block_size=config.kv.block_size, dtype="fp32", kv_heads=1, head_dim=1)
    assert spec.page_bytes == config.kv.block_size * ENTRY_BYTES
    memory = config.kv.memory_bytes
    available = int((1 << 24) * config.kv.memory_fraction) if memory is None else memory
    kv = plan_pool(config, (spec,), (available,), max(8192, config.scheduler.max_model_len or 0))
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
    return Loaded(
        executor=executor,
        plan=kv,
        digest=digest,
        kv_heads=1,
        vocab_size=MAX_TOKEN_IDS,
        task=task,
        adapters=executor if config.lora.max_loras else None,
    )


def _load_adapters(adapters: AdapterRegistry, config: EngineConfig) -> None:
    """Those of the command line. Raises ConfigError with what is wrong with all of them."""
    problems: list[str] = []
    for name, folder in config.lora.adapters:
        try:
            adapters.load(name, folder)
        except ConfigError as e:
            problems += [f"--lora {name}: {problem}" for problem in e.problems]
        except InvalidRequest as e:
            problems.append(f"--lora {name}: {e.message}")
    if problems:
        raise ConfigError(problems)


def _listed_adapters(adapters: AdapterRegistry, config: EngineConfig) -> ListedAdapters | None:
    """Those of --lora-file, tried once: an engine is ready with what can be loaded, and tells of the rest."""
    if not config.lora.file:
        return None
    listed = ListedAdapters(adapters, Path(config.lora.file), reserved=[name for name, _ in config.lora.adapters])
    listed.turn(time.monotonic())
    return listed


def _grammars(model: str, vocab_size: int) -> Grammars:
    return Grammars.load(model, eos_token_ids=Tokenizer.load(model, trusted=True).eos_token_ids, vocab_size=vocab_size)


class _Mover:
    """The transfer side of an engine, or its absence."""

    def __init__(self, info: TransferInfo, handoff: HandoffFactory | None = None, shares: str = "") -> None:
        """`shares`: equal for engines that find each other's values in a pool."""
        self.info = info
        self.handoff = handoff
        self.shares = shares

    @staticmethod
    def start(config: EngineConfig, loaded: Loaded, credentials: Credentials | None) -> _Mover:
        """Register the pool with the transport, measure it, and offer the agent to the loop."""
        if config.transfer.mode == "none":
            return _Mover(TransferInfo(epoch=uuid.uuid4().hex))
        from ..transfer.agent import TransferAgent
        from ..transfer.factory import make_transfer, store_secret

        memory = replace(loaded.executor.kv_region(), layout_digest=loaded.digest)
        assert memory.in_runs, "refused with its flags"
        settings = config.transfer
        if settings.mode == "direct" and memory.device == "cpu":
            # Within 0.4 % of the CPU time of a prompt, which is nothing beside a wrong answer.
            settings = replace(settings, verify_crc=True)
        epoch = uuid.uuid4().hex
        secret = store_secret(settings.store)
        others = loaded.other_ranks
        transfer = make_transfer(settings, epoch=epoch, credentials=credentials, secret=secret, others=others)
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
            return TransferAgent(
                transfer,
                memory,
                settings,
                notify,
                time.monotonic,
                epoch=info.epoch,
                vocab_size=loaded.vocab_size,
                rank_checksums=[other.checksum for other in others],
            )

        return _Mover(info, handoff, pool_name(secret, "fingerprint") if secret else "")
