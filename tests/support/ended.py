"""Servers of tests whose connections end with them.

asyncio and aiohttp forget those which are being accepted when a server is closed. The collector would find their
sockets in the time of a later test, which would fail for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def accepted() -> None:
    """Returns when no connection of this loop is being accepted. A server that is closed then, before anything else
    runs, loses none; one that is closed before leaves their sockets open. For loops of asyncio's own."""
    while coming := [one for one in asyncio.all_tasks() if _name(one) == "_accept_connection2"]:
        await asyncio.wait(coming)


def _name(task: asyncio.Task[object]) -> str:
    return getattr(task.get_coro(), "__name__", "")


async def end(runner: web.AppRunner) -> None:
    """`runner.cleanup()`, and of those connections, too, that are being accepted."""
    await accepted()
    await runner.cleanup()


@asynccontextmanager
async def answering(handle: Handle, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[int]:
    """Its port: asyncio's server of streams. What is open at the end is aborted."""
    transports: list[asyncio.BaseTransport] = []

    class Noted(asyncio.StreamReaderProtocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transports.append(transport)
            super().connection_made(transport)

    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Noted(asyncio.StreamReader(), handle), host, port)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        await accepted()
        server.close()
        for transport in transports:
            assert isinstance(transport, asyncio.WriteTransport)
            transport.abort()
