"""The HTTP client for engines, against a server that writes exactly the bytes a test wants, cut anywhere."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from ended import answering
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_runtime.protocol.calls import TicketCall
from isthmus_runtime.protocol.ticket import Ticket
from isthmus_runtime.router import wire
from isthmus_runtime.router.links import Links
from isthmus_runtime.router.wire import BadAnswer, Wire

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def sized(body, status=b"200 OK", extra=b""):
    return b"HTTP/1.1 %b\r\n%bContent-Length: %d\r\n\r\n%b" % (status, extra, len(body), body)


def chunks(*parts):
    return b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts)


class Server:
    """Answers each request with the next script: bytes, events to wait for, and None to close."""

    def __init__(self, *scripts) -> None:
        self.scripts = list(scripts)
        self.requests = []
        self.connections = 0
        self.open = 0

    async def handle(self, reader, writer):
        self.connections += 1
        self.open += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append((head, await reader.readexactly(length)))
                for part in self.scripts.pop(0):
                    if part is None:
                        writer.transport.abort()
                        return
                    if isinstance(part, asyncio.Event):
                        await part.wait()
                    else:
                        writer.write(part)
                        await writer.drain()
                        await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()
            self.open -= 1

    @asynccontextmanager
    async def serve(self):
        async with answering(self.handle) as port:
            client = Wire()
            try:
                yield f"http://127.0.0.1:{port}", client
            finally:
                client.close()


async def until(condition):
    """The test's own deadline bounds this."""
    while True:
        if condition():
            return
        await asyncio.sleep(0)


def run(work):
    return asyncio.run(asyncio.wait_for(work, 20))


async def call(client, url, body=b"{}"):
    exchange = await client.post(url, "/x", (body,))
    try:
        return exchange.status, await exchange.read()
    finally:
        exchange.release()


@pytest.mark.parametrize("sizes", [(), (0,), (3, 0, 5), (70_000,), (1, 3_000_000, 2, 60_000)])
def test_a_body_in_parts_arrives_whole(sizes):
    body = tuple(bytes([65 + number]) * size for number, size in enumerate(sizes))

    async def main():
        server = Server([sized(b"{}")])
        async with server.serve() as (url, client):
            exchange = await client.post(url, "/x", body)
            assert await exchange.read() == b"{}"
            exchange.release()
        assert [sent for _, sent in server.requests] == [b"".join(body)]

    run(main())


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.binary(min_size=1, max_size=40), max_size=5),
    cuts=st.lists(st.integers(0, 300), max_size=6),
    trailer=st.sampled_from([b"", b"X-Sum: 1\r\n"]),
    framed=st.booleans(),
)
def test_answers_survive_any_cut(parts, cuts, trailer, framed):
    raw = CHUNKED + chunks(*parts) + b"0\r\n" + trailer + b"\r\n" if framed else sized(b"".join(parts))
    places = sorted({0, len(raw), *(c for c in cuts if c < len(raw))})
    pieces = [raw[a:b] for a, b in pairwise(places)]

    async def main():
        server = Server(pieces, [sized(b"next")])
        async with server.serve() as (url, client):
            assert await call(client, url, b"abc") == (200, b"".join(parts))
            assert await call(client, url) == (200, b"next")
            assert server.connections == 1
            head, body = server.requests[0]
            assert head.startswith(b"POST /x HTTP/1.1\r\nHost: 127.0.0.1:") and body == b"abc"

    run(main())


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 abc\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"x" * (wire._MAX_HEAD + 1),
        sized(b"four") + b"more",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"-1\r\n",
        CHUNKED + b"2\r\nabcd",
        CHUNKED + b"fffffffffffffffff\r\n",
        CHUNKED + b"1" * 2000,
        CHUNKED + b"0\r\n\r\nmore",
    ],
)
def test_what_is_no_answer_ends_the_connection(answer):
    async def main():
        server = Server([answer])
        async with server.serve() as (url, client):
            with pytest.raises(BadAnswer):
                await call(client, url)
            await until(lambda: not server.open)

    run(main())


def test_a_broken_connection_is_an_error_after_what_came():
    async def main():
        server = Server([CHUNKED + chunks(b"one"), None], [None], [sized(b"ok", extra=b"Connection: close\r\n")])
        async with server.serve() as (url, client):
            exchange = await client.post(url, "/x", ())
            assert await exchange.readany() == b"one"
            with pytest.raises(ConnectionError):
                await exchange.readany()
            exchange.release()
            with pytest.raises(ConnectionError):
                await call(client, url)
            assert await call(client, url) == (200, b"ok")
            assert server.connections == 3

    run(main())


def test_close_wakes_the_reader():
    async def main():
        never = asyncio.Event()
        server = Server([CHUNKED, never])
        async with server.serve() as (url, client):
            exchange = await client.post(url, "/x", ())
            reader = asyncio.create_task(exchange.readany())
            await asyncio.sleep(0)
            exchange.close()
            with pytest.raises(ConnectionAbortedError):
                await reader
            never.set()

    run(main())


def test_a_cancelled_call_leaves_no_connection():
    async def main():
        never = asyncio.Event()
        server = Server([never])
        async with server.serve() as (url, client):
            work = asyncio.create_task(client.post(url, "/x", ()))
            await until(lambda: server.requests)
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            never.set()
            await until(lambda: not server.open)

    run(main())


def test_a_released_answer_is_read_to_its_end_and_the_connection_used_again():
    async def main():
        rest = asyncio.Event()
        server = Server([CHUNKED + chunks(b"one"), rest, chunks(b"two" * 1000) + b"0\r\n\r\n"], [sized(b"next")])
        async with server.serve() as (url, client):
            exchange = await client.post(url, "/x", ())
            assert await exchange.readany() == b"one"
            exchange.release()
            rest.set()
            await until(lambda: client._idle[url])
            assert await call(client, url) == (200, b"next") and server.connections == 1

    run(main())


def test_a_slow_reader_stops_the_engine():
    """What is held for it stays bounded, and nothing of it is lost."""

    async def main():
        part, count = b"x" * 65536, 400
        server = Server([CHUNKED, *([chunks(part)] * count), b"0\r\n\r\n"])
        async with server.serve() as (url, client):
            exchange = await client.post(url, "/x", ())
            await until(lambda: exchange._paused)
            assert exchange._held <= wire._HIGH_WATER + (1 << 20)
            assert await exchange.read() == part * count
            exchange.release()

    run(main())


def test_idle_connections_grow_old(monkeypatch):
    async def main():
        server = Server([sized(b"a")], [sized(b"b")])
        async with server.serve() as (url, client):
            await call(client, url)
            monkeypatch.setattr(wire, "KEEP_ALIVE_S", -1.0)
            await call(client, url)
            assert server.connections == 2
            client.forget(url)
            await until(lambda: not server.open)

    run(main())


def test_a_ticket_that_an_engine_refuses_is_told_in_the_log(caplog):
    async def main():
        server = Server((sized(b'{"error": {"message": "no such attempt"}}', b"404 Not Found"),))
        async with server.serve() as (url, _):
            links = Links()
            links.ticket(url, TicketCall(ticket=Ticket(mode="memory", attempt="a-1", layout_digest="d")))
            await links.close()

    run(main())
    assert "the ticket of attempt a-1 was refused by http" in caplog.text and "no such attempt" in caplog.text
