"""Times of objects are by the API server's clock, and so are decisions, whatever this machine's says."""

import asyncio
import time
from email.utils import formatdate

import pytest
from ended import answering
from kubernetes.aio.client import ApiClient, Configuration

from isthmus_operator.shell.client import Api


@pytest.mark.parametrize(
    ("ahead", "used"),
    [(3600.0, 3600.0), (-3600.0, -3600.0), (2.0, 0.0), (None, 0.0)],
    ids=["ahead", "behind", "same", "no"],
)
def test_the_servers_clock_is_used(ahead: float | None, used: float) -> None:
    date = "yesterday" if ahead is None else formatdate(time.time() - ahead, usegmt=True)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\nDate: {date}\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        await writer.drain()

    async def main() -> float:
        async with answering(handle) as port:
            api = Api(ApiClient(configuration=Configuration(host=f"http://127.0.0.1:{port}")))
            assert abs(time.time() - api.now()) < 60, "before an answer it is this one's"
            assert await api.get("/api") == {}
            await api.close()
            return time.time() - api.now()

    assert abs(asyncio.run(main()) - used) < 60
