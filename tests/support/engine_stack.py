"""An engine loop over a FakeExecutor, with its asyncio streams: what tests of the loop and the server share."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from engine_world import make_plan

from isthmus_runtime.config import SchedulerConfig
from isthmus_runtime.engine.backend import EngineBackend
from isthmus_runtime.engine.exchange import Sink
from isthmus_runtime.engine.host import EngineHost
from isthmus_runtime.engine.kv_events import KvEventFeed
from isthmus_runtime.engine.local import LocalEngine
from isthmus_runtime.engine.long_lived import LongLived
from isthmus_runtime.engine.loop import EngineLoop
from isthmus_runtime.engine.remote import RemoteEngine
from isthmus_runtime.engine.scheduler import Scheduler
from isthmus_runtime.engine.seam import EngineFacts
from isthmus_runtime.engine.streams import Streams
from isthmus_runtime.engine.traces import StartTimes
from isthmus_runtime.executor.fake import MAX_TOKEN_IDS, FakeExecutor
from isthmus_runtime.interfaces.handoff import HandoffEvent, KvHandoff
from isthmus_runtime.interfaces.steps import Executor
from isthmus_runtime.kv.pool import BlockPool
from isthmus_runtime.kv.prefix import BlockEvent
from isthmus_runtime.protocol.info import KvInfo, TransferInfo

Handoff = Callable[[Callable[[HandoffEvent], None]], KvHandoff]


def make_loop(
    sink: Sink,
    executor: Executor,
    *,
    num_blocks: int = 65,
    block_size: int = 4,
    max_model_len: int = 128,
    handoff: Handoff | None = None,
    max_loras: int = 0,
    events: deque[BlockEvent] | None = None,
    started: object = None,
    **scheduler: object,
) -> EngineLoop:
    """A loop that does not run yet."""
    config = SchedulerConfig(**{"max_batched_tokens": 32, "max_num_seqs": 8, **scheduler})  # type: ignore[arg-type]
    plan = make_plan(num_blocks, block_size, max_model_len)
    digest = executor.kv_region().layout_digest
    pool = BlockPool(num_blocks, events=events)
    core = Scheduler(config, plan, pool, layout_digest=digest, late_masks=True, max_loras=max_loras)
    adapters = executor if isinstance(executor, FakeExecutor) else None
    return EngineLoop(core, executor, sink, handoff=handoff, started=started, adapters=adapters)  # type: ignore[arg-type]


@contextmanager
def engine(
    *, executor: Executor | None = None, threads: LongLived | None = None, **settings: object
) -> Iterator[EngineBackend]:
    """A running engine; must be entered inside a running event loop."""
    executor = executor or FakeExecutor(65, 4)
    streams = Streams(asyncio.get_running_loop())
    loop = make_loop(streams.sink, executor, **settings)  # type: ignore[arg-type]
    loop.start()
    try:
        yield EngineBackend(LocalEngine(loop, streams.sink, threads=threads), streams, vocab_size=MAX_TOKEN_IDS)
    finally:
        loop.stop()
        executor.close()


class Apart(RemoteEngine):
    """An engine behind a channel, whose other end is in this process, too."""

    loop: EngineLoop
    host: EngineHost
    lost: list[str]
    """Why the engine's end gave up."""
    theirs: socket.socket


@asynccontextmanager
async def engine_apart(
    *,
    executor: Executor | None = None,
    threads: LongLived | None = None,
    silence_s: float = 30.0,
    max_unread_bytes: int = 64 << 20,
    feed: KvEventFeed | None = None,
    starts: StartTimes | None = None,
    local: Callable[[EngineLoop, EngineHost], LocalEngine] | None = None,
    **settings: object,
) -> AsyncIterator[EngineBackend]:
    """The same behind a channel. `local` makes the engine at its other end, by default one without grammars."""
    executor = executor or FakeExecutor(65, 4)
    streams = Streams(asyncio.get_running_loop())
    ours, theirs = socket.socketpair()
    lost: list[str] = []
    host = EngineHost(theirs, lost=lost.append, clock=time.monotonic, traced=starts is not None)
    loop = make_loop(host.sink, executor, events=host.events, started=host.started, **settings)  # type: ignore[arg-type]
    remote = Apart(
        streams,
        silence_s=silence_s,
        started=None if starts is None else starts.note,
        changed=None if feed is None else feed.take,
        max_unread_bytes=max_unread_bytes,
    )
    remote.loop, remote.host, remote.lost, remote.theirs = loop, host, lost, theirs
    await remote.connect(ours)
    host.start()
    loop.start()
    facts = EngineFacts(
        kv=KvInfo(
            block_size=4, physical_blocks=65, usable_blocks=64, bytes_per_block=32, max_model_len=128, layout_digest="d"
        ),
        transfer=TransferInfo(),
        fingerprint="f",
        vocab_size=MAX_TOKEN_IDS,
        model_revision="",
    )
    host.serve(LocalEngine(loop, host.sink, threads=threads) if local is None else local(loop, host), facts)
    try:
        async with asyncio.timeout(20):
            assert await remote.ready == facts
        yield EngineBackend(remote, streams, vocab_size=MAX_TOKEN_IDS, starts=starts)
    finally:
        host.stop.set()
        await asyncio.to_thread(loop.stop)
        await asyncio.to_thread(host.finish, 5.0)
        remote.close()
        theirs.close()
        executor.close()
