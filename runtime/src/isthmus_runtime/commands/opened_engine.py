"""An engine that runs, in this process or in one of its own, for the HTTP side to serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from ..config import EngineConfig
from ..engine.kv_events import KvEventFeed
from ..engine.loop import STOP_S
from ..engine.seam import Engine, EngineFacts
from ..engine.streams import Streams
from ..engine.traces import StartTimes
from ..errors import EngineFailed
from .engine_core import Loaded, start_engine
from .engine_process import EngineProcess, check_status

log = logging.getLogger(__name__)

_LEAVE_S = STOP_S + 2.0
"""For an engine process to stop, and to give back its device and end its ranks; then it is killed, which they notice.
With the rest of what `run_app` takes, within the 15 s that pods have after their drain."""
END_S = 45.0
"""The same where nothing asked for its end: it broke, or could not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEngine:
    """An engine that has been started."""

    engine: Engine
    facts: EngineFacts
    stop: Callable[[], Awaitable[None]]
    """Ends its requests and transfers."""
    gone: asyncio.Event | None
    """Set when it has ended by itself, for `run_app` to end, too; None: it ends with this process."""
    pid: int | None = None
    """Of the engine's process; None: it is this one."""


OpenEngine = Callable[[Streams, KvEventFeed | None, StartTimes | None], AbstractAsyncContextManager[RunningEngine]]
"""Starts an engine that tells these of replies, cache changes and starts, and ends it. EngineFailed: it broke."""


def here(config: EngineConfig, loaded: Loaded) -> OpenEngine:
    """Opens an engine in this process, on a thread of its own."""

    @asynccontextmanager
    async def opened(
        streams: Streams, feed: KvEventFeed | None, starts: StartTimes | None
    ) -> AsyncIterator[RunningEngine]:
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
            yield RunningEngine(engine=core.engine, facts=core.facts, stop=stop, gone=None)
        finally:
            core.close()
        if core.engine.loop.failure:
            raise EngineFailed(core.engine.loop.failure)

    return opened


def apart(config: EngineConfig, process: EngineProcess) -> OpenEngine:
    """Opens the engine in `process`, which was started for it."""
    from ..engine.remote import RemoteEngine

    @asynccontextmanager
    async def opened(
        streams: Streams, feed: KvEventFeed | None, starts: StartTimes | None
    ) -> AsyncIterator[RunningEngine]:
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
            check_status(process.end(END_S))
            raise EngineFailed("the engine process ended before it served") from error
        log.info("engine process %d serves", process.pid)

        async def stop() -> None:
            process.expect_end(_LEAVE_S)
            await engine.stop(STOP_S)

        gone = asyncio.Event()  # signals set it, too
        watch = asyncio.ensure_future(engine.ended.wait())
        watch.add_done_callback(lambda _: gone.set())
        try:
            yield RunningEngine(engine=engine, facts=facts, stop=stop, gone=gone, pid=process.pid)
        finally:
            watch.cancel()
            engine.close()

    return opened
