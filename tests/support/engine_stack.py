"""An engine loop over a FakeExecutor, with its asyncio streams: what tests of the loop and the server share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine_world import make_plan

from isthmus_runtime.config import SchedulerConfig
from isthmus_runtime.engine.backend import EngineBackend, Streams
from isthmus_runtime.engine.local import LocalEngine
from isthmus_runtime.engine.long_lived import LongLived
from isthmus_runtime.engine.loop import EngineLoop
from isthmus_runtime.engine.scheduler import Scheduler
from isthmus_runtime.executor.fake import MAX_TOKEN_IDS, FakeExecutor
from isthmus_runtime.interfaces.handoff import HandoffEvent, KvHandoff
from isthmus_runtime.interfaces.steps import Executor
from isthmus_runtime.kv.pool import BlockPool

Handoff = Callable[[Callable[[HandoffEvent], None]], KvHandoff]


@contextmanager
def engine(
    *,
    num_blocks: int = 65,
    block_size: int = 4,
    max_model_len: int = 128,
    executor: Executor | None = None,
    handoff: Handoff | None = None,
    threads: LongLived | None = None,
    **scheduler: object,
) -> Iterator[EngineBackend]:
    """A running engine; must be entered inside a running event loop."""
    executor = executor or FakeExecutor(num_blocks, block_size)
    config = SchedulerConfig(**{"max_batched_tokens": 32, "max_num_seqs": 8, **scheduler})  # type: ignore[arg-type]
    plan = make_plan(num_blocks, block_size, max_model_len)
    digest = executor.kv_region().layout_digest
    core = Scheduler(config, plan, BlockPool(num_blocks), layout_digest=digest, late_masks=True)
    streams = Streams(asyncio.get_running_loop())
    loop = EngineLoop(core, executor, streams.sink, handoff=handoff)
    loop.start()
    try:
        yield EngineBackend(LocalEngine(loop, streams.sink, threads=threads), streams, vocab_size=MAX_TOKEN_IDS)
    finally:
        loop.stop()
        executor.close()
