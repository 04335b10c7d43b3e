"""A connection that a server of a test is accepting when it ends leaves no socket behind."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import left_open
import pytest
from aiohttp import web
from ended import answering, end
from left_open import none_left_open


@asynccontextmanager
async def of_aiohttp() -> AsyncIterator[int]:
    runner = web.AppRunner(web.Application(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield int(runner.addresses[0][1])
    finally:
        await end(runner)


def of_streams() -> object:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    return answering(say_nothing)


@pytest.mark.parametrize("serve", [of_aiohttp, of_streams])
@pytest.mark.parametrize("turns", range(6))
def test_whenever_a_client_comes(serve, turns) -> None:
    async def main() -> None:
        async with serve() as port:
            client.connect(("127.0.0.1", port))
            for _ in range(turns):
                await asyncio.sleep(0)

    with none_left_open(), socket.socket() as client:
        asyncio.run(main())
        # Still open: nothing of the other side may wait for its end.


def test_what_is_left_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_open, "CLOSING_S", 0.0)
    with pytest.raises(AssertionError, match=r"left open: \('127.0.0.1', \d+\) to nobody"), none_left_open():
        one = socket.create_server(("127.0.0.1", 0))
    one.close()
