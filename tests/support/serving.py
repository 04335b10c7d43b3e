"""An application of the runtime on a free loopback port, as `serve` runs it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any

import fastapi.routing
import pytest
import uvicorn.server
from fastapi import FastAPI

from isthmus_runtime.serving import half_closed
from isthmus_runtime.serving.in_flight import InFlight
from isthmus_runtime.serving.server import run_app

# Hundreds of tests make an application of the same routes. FastAPI would make what it checks each answer with anew, 200
# of them for the API: most of what such a test takes.
fastapi.routing.create_model_field = functools.cache(fastapi.routing.create_model_field)

_prompt = ContextVar("_prompt", default=False)
"""In the task of a server that `served` started: it ends as soon as its connections have."""


class _Asyncio:
    """asyncio as uvicorn's server sees it, which sleeps a tenth of a second at each end, whatever is left to wait for:
    in all tests together more than a minute."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(delay: float) -> None:
        await asyncio.sleep(min(delay, 0.002) if _prompt.get() else delay)


uvicorn.server.asyncio = _Asyncio()


class Drained(InFlight):
    """Requests of a server whose drain can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.began = asyncio.Event()
        """The drain has."""

    def start_drain(self) -> None:
        super().start_drain()
        self.began.set()


@asynccontextmanager
async def served(app: FastAPI, **settings: Any) -> AsyncIterator[int]:
    """Its port. What still runs at the end is aborted at once."""
    stop = asyncio.Event()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def started(bound: int) -> None:
        _prompt.set(True)  # its ticks, a task that runs by now, keep their pace
        port.set_result(bound)

    settings = {"host": "127.0.0.1", "port": 0, "drain_timeout_s": 0.0, **settings}
    task = asyncio.create_task(run_app(app, stop=stop, on_started=started, **settings))
    await asyncio.wait({task, port}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    try:
        yield await port
    finally:
        stop.set()
        await task


def parse(answer: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """[(status, headers, body)] of whole answers with a Content-Length."""
    found = list[tuple[int, dict[str, str], bytes]]()
    while answer:
        head, _, rest = answer.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
        length = int(headers["content-length"])
        found.append((int(first.split()[1]), headers, rest[:length]))
        answer = rest[length:]
    return found


@contextmanager
def looking() -> Iterator[asyncio.Event]:
    """Set once a server on this loop has looked whether a client that sends no more has left."""
    looked, look = asyncio.Event(), half_closed._look

    def noted(transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, waited: float) -> None:
        look(transport, loop, waited)
        looked.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(half_closed, "_look", noted)
        yield looked
