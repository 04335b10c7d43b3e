"""What the server does with the bytes of clients, on every kind of path: sockets on loopback, no client library."""

import asyncio
import gc
import gzip
import json
import logging
import socket
import struct
import threading
import tracemalloc
import zlib
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace

import aiohttp
import pytest
import serving
import uvloop
from fastapi import Request
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from serving import parse
from starlette.responses import Response

from isthmus_runtime.serving.answering import Answering
from isthmus_runtime.serving.app import add_pages, make_app
from isthmus_runtime.serving.call import Call, add_call_route, authorization
from isthmus_runtime.serving.limits import Limits
from isthmus_runtime.serving.server import Server, run_app

PATH = "/v1/completions"
PATHS = [PATH, "/typed", "/internal/generate", "/nothing"]
"""A call route, one of FastAPI's own, an internal one, and none at all."""
BODY_LIMIT = 1 << 20
LIMITS = {"sweep_s": 0.0}


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    factory = uvloop.new_event_loop if request.param == "uvloop" else None

    def go(work):
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(asyncio.wait_for(work, 60))

    return go


async def echo(call):
    """Answers with what it got."""
    body = await call.read()
    got = {"path": call.path, "authorization": authorization(call), "body": body.decode("latin-1")}
    await call.reply(200, {"content-type": "application/json", "x-request-id": "r"}, json.dumps(got).encode())


class Served:
    def __init__(self, port, server) -> None:
        self.port = port
        self.server = server

    @property
    def connections(self):
        return self.server.server_state.connections

    async def connect(self):
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def raw(self, data):
        """All bytes that come back for `data` on a connection, whose end we announce with the last request."""
        reader, writer = await self.connect()
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        return answer


def application(serve):
    app = make_app("test", bodies=(), max_body_bytes=BODY_LIMIT)

    async def call_route(call: Call) -> None:
        await serve(call)

    async def typed(request: Request) -> Response:
        body = await request.body()
        return Response(json.dumps({"path": "/typed", "body": body.decode("latin-1")}))

    async def health() -> dict[str, str]:
        return {"status": "ok"}

    for path in (PATH, "/internal/generate"):
        add_call_route(app, path, call_route, "POST")
    app.add_api_route("/typed", typed, methods=["POST"])
    app.add_api_route("/health", health)
    add_pages(app)
    return app


@asynccontextmanager
async def served(serve=echo, **limits):
    servers = []

    class Noted(Server):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            servers.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isthmus_runtime.serving.server.Server", Noted)
        async with serving.served(application(serve), limits=Limits(**{**LIMITS, **limits})) as port:
            yield Served(port, servers[0])


def endless():
    """A call that goes on until it is cancelled, and the events of its beginning and its end."""
    began, ended = asyncio.Event(), asyncio.Event()

    async def serve(call):
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    return serve, began, ended


def post(body=b"{}", *fields, path=PATH, close=False, version="1.1"):
    lines = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(body)}", *fields]
    if close:
        lines.append("Connection: close")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def chunked(*parts, path=PATH, end=True):
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts) + (b"0\r\n\r\n" if end else b"")


async def until(condition):
    """The test's own deadline bounds this."""
    while True:
        if condition():
            return
        await asyncio.sleep(0)


def refused(answer, status, word):
    """Whether the last of these answers is an error of ours, in OpenAI's form, and the last on its connection."""
    got, headers, body = parse(answer)[-1]
    error = json.loads(body)["error"]
    assert (got, headers["connection"], headers["content-type"]) == (status, "close", "application/json"), answer
    assert word in error["message"] and set(error) >= {"message", "type", "param", "code"}
    return True


# ------------------------------------------------------------------------------------------------------------ requests


def test_a_connection_serves_one_call_after_another(run):
    async def main():
        async with served() as s, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
            for i in range(5):
                async with session.post(
                    f"http://127.0.0.1:{s.port}{PATH}", data=b"x" * i, headers={"Authorization": "Bearer ä"}
                ) as answer:
                    assert answer.status == 200 and answer.headers["X-Request-Id"] == "r" and answer.headers["Date"]
                    got = await answer.json()
                    assert got["body"] == "x" * i and got["authorization"] == "Bearer ä"
            assert len(s.connections) == 1
            ((status, headers, body),) = parse(await s.raw(post(b"last", close=True)))
            assert status == 200 and headers["connection"] == "close" and json.loads(body)["body"] == "last"

    run(main())


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(bodies=st.lists(st.binary(max_size=60), min_size=1, max_size=4), cuts=st.lists(st.integers(1, 400), max_size=8))
def test_requests_survive_any_cut_and_are_answered_in_order(bodies, cuts):
    async def main():
        async with served() as s:
            *most, last = bodies
            data = b"".join(post(b) for b in most) + post(last, close=True)
            reader, writer = await s.connect()
            position = 0
            for cut in cuts:
                writer.write(data[position : position + cut])
                await writer.drain()
                await asyncio.sleep(0)
                position += cut
            writer.write(data[position:])
            answers = parse(await asyncio.wait_for(reader.read(), 20))
            writer.close()
            assert [json.loads(body)["body"].encode("latin-1") for _, _, body in answers] == bodies

    asyncio.run(main())


FORMS = {
    "get": (b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200),
    "other path": (post(path="/v1/nothing", close=True), 404),
    "other method": (b"GET " + PATH.encode() + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 405),
    "query": (post(path=PATH + "?a=1", close=True), 200),
    "absolute form": (post(path=f"http://x{PATH}", close=True), 200),
    "escaped path": (post(path="/v1/%63ompletions", close=True), 200),
    "http/1.0": (post(version="1.0"), 200),
    "lower case": (post(close=True).replace(b"POST", b"post"), 400),
    "chunked": (chunked(b"{", b"}"), 200),
    "chunked and length": (post(b"0\r\n\r\n", "Transfer-Encoding: chunked", close=True), 400),
    "identity after chunked": (post(b"", "Transfer-Encoding: chunked, identity", close=True), 400),
    "gzip in chunks": (chunked(gzip.compress(b"{}", mtime=0)).replace(b": chunked", b": gzip, chunked"), 501),
    "chunks in chunks": (chunked(b"{}").replace(b": chunked", b": chunked, chunked"), 400),
    "chunks twice": (chunked(b"{}").replace(b"Host: x", b"Host: x\r\nTransfer-Encoding: chunked"), 400),
    "chunks in upper case": (chunked(b"{}").replace(b": chunked", b":  Chunked "), 200),
    "two lengths": (post(b"{}", "Content-Length: 2", close=True), 400),
    "two different lengths": (post(b"{}", "Content-Length: 1", close=True), 400),
    "length with a sign": (post(b"{}", close=True).replace(b"Length: 2", b"Length: +2"), 400),
    "length with an underscore": (post(b"0123456789", close=True).replace(b"Length: 10", b"Length: 1_0"), 400),
    "no length": (post(b"", close=True).replace(b"Content-Length: 0\r\n", b""), 200),
    "space before the colon": (post(b"{}", close=True).replace(b"Length:", b"Length :"), 400),
    "folded line": (post(b"{}", "X: a\r\n b", close=True), 400),
    "bare line feed": (post(b"{}", "X: a\nY: b", close=True), 400),
    "only line feeds": (post(b"{}", close=True).replace(b"\r\n", b"\n"), 400),
    "control character": (post(b"{}", "X: a\0b", close=True), 400),
    "gzip": (post(gzip.compress(b"{}", mtime=0), "Content-Encoding: gzip", close=True), 200),
    "deflate": (post(zlib.compress(b"{}"), "Content-Encoding: Deflate", close=True), 200),
    "broken gzip": (post(b"hello", "Content-Encoding: gzip", close=True), 400),
    "half of a gzip": (post(gzip.compress(b"{}", mtime=0)[:-9], "Content-Encoding: gzip", close=True), 400),
    "more than a gzip": (post(gzip.compress(b"{}", mtime=0) + b"x", "Content-Encoding: gzip", close=True), 400),
    "unknown encoding": (post(b"{}", "Content-Encoding: br", close=True), 415),
    "two encodings": (post(b"{}", "Content-Encoding: gzip", "Content-Encoding: br", close=True), 415),
    "too large a body": (post(b"x" * (BODY_LIMIT + 1), close=True), 413),
    "too large a chunked body": (chunked(*[b"x" * (1 << 18)] * 5), 413),
    "too large a body, packed": (
        post(gzip.compress(bytes(BODY_LIMIT + 1), mtime=0), "Content-Encoding: gzip", close=True),
        413,
    ),
    "large head": (post(b"{}", "X: " + "y" * (16 << 10), close=True), 431),
    "many headers": (post(b"{}", *[f"X{i}: y" for i in range(4000)], close=True), 431),
    "some headers": (post(b"{}", *[f"X{i}: y" for i in range(120)], close=True), 200),
    "tiny headers": (post(b"{}", *[f"X{i}: y" for i in range(130)], close=True), 431),
    "tiny headers without end": (post(b"{}", *[f"X{i}: y" for i in range(130)])[:-10], 431),
    "large target": (post(b"{}", path="/" + "y" * (16 << 10), close=True), 431),
    "large trailer": (chunked(end=False) + b"0\r\n" + b"X: y\r\n" * 250_000 + b"\r\n", 431),
    "no http": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n", 400),
    "http/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "a target that cannot be read": (post(b"{}", path="http://a:99999999/v1/models"), 400),
    "connect": (b"CONNECT a:443 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "two hosts": (post(b"{}", "Host: y", close=True), 400),
    "no host": (post(b"{}", close=True).replace(b"Host: x\r\n", b""), 400),
    "upgrade with a body": (post(b"{}", "Connection: upgrade, close", "Upgrade: h2c"), 400),
    "upgrade with chunks": (chunked(b"{}").replace(b"Host: x", b"Host: x\r\nConnection: upgrade\r\nUpgrade: h2c"), 400),
    "upgrade without a body": (post(b"", "Connection: upgrade, close", "Upgrade: h2c"), 200),
    "connection tokens": (post(b"{}", "Connection: keep-alive, close"), 200),
    "trailer": (chunked(b"{}", end=False) + b"0\r\nX: y\r\n\r\n", 200),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_request_has_one_meaning(run, name):
    data, expected = FORMS[name]

    async def main():
        async with served() as s:
            status, headers, body = parse(await s.raw(data))[0]
            got = json.loads(body)
            assert status == expected, body
            if status == 200:
                assert got.get("body", "") in ("", "{}")
            else:
                assert got["error"]["message"] and headers["content-type"] == "application/json"

    run(main())


FIELD = st.sampled_from(
    ["X: y", "Content-Length: 2", "Content-Length: 3", "Transfer-Encoding: chunked", "transfer-encoding: identity",
     "Host: z", "Connection: keep-alive", "Connection: upgrade", "Upgrade: h2c", "Expect: x", "A\tB: c", " X: y", "X",
     "X:", "X:y\x7f", "Content-Encoding: identity", "Accept: */*", "Content-Type: application/json", "TE: trailers",
     "Cookie: a", "Cookie: b"]
)  # fmt: skip
AMBIGUOUS = {"content-length", "transfer-encoding", "host"}


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(fields=st.lists(FIELD, max_size=3), swap=st.booleans())
@example(fields=["Connection: upgrade", "Upgrade: h2c"], swap=False)
def test_a_head_that_can_be_read_in_two_ways_is_refused(fields, swap):
    """Another Content-Length, Transfer-Encoding or Host beside ours: a proxy in front may go by either."""
    head = ["Host: x", "Content-Length: 2", "Connection: close", *fields]
    lines = [f"POST {PATH} HTTP/1.1", *(reversed(head) if swap else head)]
    data = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n{}"

    async def main():
        async with served() as s:
            status, _, body = parse(await s.raw(data))[0]
            if any(field.partition(":")[0].lower() in AMBIGUOUS for field in fields):
                assert status == 400, (fields, body)
            assert status == 400 or (status == 200 and json.loads(body)["body"] == "{}")

    asyncio.run(main())


@pytest.mark.parametrize(("version", "close"), [("1.1", False), ("1.1", True), ("1.0", True)])
@pytest.mark.parametrize("status", [200, 429])
def test_an_answer_in_one_message_is_the_same_as_in_two(run, monkeypatch, version, close, status):
    whole, write_whole = [], Answering._write_whole
    monkeypatch.setattr(Answering, "_write_whole", lambda *args: whole.append(args[-1]) or write_whole(*args))

    async def answers(call):
        body = await call.read()
        if body == b"two":
            call.scope["extensions"] = {}
        await call.reply(status, {"content-type": "text/plain", "x-request-id": "r"}, b"the answer")

    async def main():
        async with served(answers) as s:
            got = []
            for body in (b"one", b"two"):
                requests = [] if close else [post(body, version=version)]
                requests.append(post(body, close=True, version=version))
                answer = await s.raw(b"".join(requests))
                got.append([line for line in answer.split(b"\r\n") if not line.startswith(b"date:")])
            assert got[0] == got[1]
            assert len(whole) == (1 if close else 2), "two messages alone have been compared"
            assert sum(line.endswith(b"content-length: 10") for line in got[0]) == (1 if close else 2)
            assert got[0].count(b"connection: close") == 1

    run(main())


@pytest.mark.parametrize("close", [False, True])
def test_an_answer_without_a_body_has_its_head(run, close):
    async def main():
        async with served() as s:
            reader, writer = await s.connect()
            writer.write(b"HEAD /nothing HTTP/1.1\r\nHost: x\r\n" + b"Connection: close\r\n" * close + b"\r\n")
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
            assert answer.startswith(b"HTTP/1.1 404 ")
            if close:
                assert await reader.read() == b""
            else:
                writer.write(post(b"next"))
                assert b" 200 " in await asyncio.wait_for(reader.readline(), 20)
            writer.close()

    run(main())


def test_expect_is_answered_before_the_body(run):
    async def main():
        async with served() as s:
            reader, writer = await s.connect()
            head, body = post(b"abc", "Expect: 100-continue", close=True).split(b"\r\n\r\n")
            writer.write(head + b"\r\n\r\n")
            assert b"100 Continue" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
            writer.write(body)
            ((status, _, answer),) = parse(await asyncio.wait_for(reader.read(), 20))
            writer.close()
            assert status == 200 and json.loads(answer)["body"] == "abc"
            # What is too large is refused instead.
            reader, writer = await s.connect()
            writer.write(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 30}\r\n".encode())
            writer.write(b"Expect: 100-continue\r\n\r\n")
            assert b" 413 " in await asyncio.wait_for(reader.readline(), 20)
            writer.close()

    run(main())


# -------------------------------------------------------------------------------------------------------------- limits


def drips(path):
    """What never becomes a request, after what is answered first: (bytes, number of answers before the refusal)."""
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    large = 80 << 10
    return {
        "a first byte": (b"P", 0),
        "half a head": (post(path=path)[:20], 0),
        "all but the last byte": (post(b"{}", path=path)[:-1], 0),
        "a body over 64 KiB": (post(b"x" * large, path=path)[:-1], 0),
        "a chunked body": (chunked(b"x", path=path, end=False), 0),
        "a chunked body over 64 KiB": (chunked(b"x" * large, path=path, end=False), 0),
        "a chunk size": (chunked(path=path, end=False) + b"f", 0),
        "a trailer": (chunked(path=path, end=False) + b"0\r\nX: y\r\n", 0),
        "a long head": (post(b"{}", "X: " + "y" * 8000, path=path)[:-10], 0),
        "the second head": (post(b"{}") + post(path=path)[:30], 1),
        "the second body": (post(b"{}") + post(b"x" * large, path=path)[:-1], 1),
        "a head after a get": (whole + post(path=path)[:30], 1),
        "a get after a get": (whole * 2 + whole[:-1], 2),
    }


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", drips(PATH))
def test_a_request_that_does_not_arrive_is_refused(run, name, path):
    data, before = drips(path)[name]

    async def main():
        async with served(arrival_s=0.05) as s:
            answer = await s.raw(data)
            if path == "/nothing" and b"\r\n\r\n" in data and before == 0:
                # Answered before it was here: there is nothing left to say, and the connection is not kept for it.
                assert parse(answer)[0][0] == 404
                return
            assert len(parse(answer)) == before + 1
            last = parse(answer)[-1]
            if path == "/nothing" and name == "the second body":
                assert last[0] == 404
            else:
                assert refused(answer, 408, "did not arrive within 0.05 s")
            await until(lambda: not s.connections)

    run(main())


def test_bytes_that_make_no_progress_are_bounded(run):
    """However they come: a client that sends on and on within the time is cut off by the head's limit."""

    async def main():
        async with served(arrival_s=600.0) as s:
            for opening, more in (
                (b"", b"\r\n"),
                (b"POST / HTTP/1.1\r\nHost: x\r\nX: ", b"y"),
                (b"POST / HTTP/1.1\r\nHost: x\r\n", b"X: y\r\n"),
                (chunked(end=False) + b"1;", b"y"),
                (chunked(end=False) + b"0\r\nX: ", b"y"),
            ):
                reader, writer = await s.connect()
                writer.write(opening)
                answer = asyncio.create_task(reader.read())
                sent = 0
                while not answer.done() and sent < (1 << 20):
                    with suppress(ConnectionError):
                        writer.write(more * 1000)
                        await writer.drain()
                    sent += len(more) * 1000
                    await asyncio.sleep(0)
                assert refused(await asyncio.wait_for(answer, 20), 431, "more than 16384 bytes")
                writer.close()

    run(main())


def test_time_counts_from_the_end_of_the_answer_before(run):
    """A client that sends the next head early is not late while it waits for its first answer."""

    async def main():
        go, began = asyncio.Event(), asyncio.Event()

        async def slow(call):
            began.set()
            await go.wait()
            await echo(call)

        async with served(slow, arrival_s=0.05) as s:
            reader, writer = await s.connect()
            second = post(b"second", close=True)
            writer.write(post(b"first") + second[:20])
            await began.wait()
            assert await s.raw(b"P")  # refused as too late: the sweep has been past both
            go.set()
            assert b"first" in await reader.readuntil(b"first")
            writer.write(second[20:])
            assert b"second" in await reader.read()
            writer.close()

    run(main())


def test_idle_connections_are_closed(run):
    async def main():
        async with served(keep_alive_s=0.05) as s:
            assert await s.raw(b"") == b""  # one that never sends
            for first in (post(b"{}"), b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", post(path="/nothing")):
                assert len(parse(await s.raw(first))) == 1  # ours to close, not the client's
            assert not s.connections

    run(main())


def test_a_call_may_last_longer_than_both(run):
    async def main():
        swept = asyncio.Event()

        async def slow(call):
            await swept.wait()
            await echo(call)

        async with served(slow, keep_alive_s=0.01, arrival_s=0.01) as s:
            answer = asyncio.create_task(s.raw(post(b"{}", close=True)))
            assert await s.raw(b"P")  # refused as too slow: a sweep has been
            swept.set()
            assert parse(await answer)[0][0] == 200

    run(main())


def test_silent_connections_make_room_for_new_ones(run):
    """One that was never heard of, one between two requests, one with half a head, one with half a body."""

    async def main():
        async with served(max_connections=4) as s:
            silent = [await s.connect() for _ in range(4)]
            silent[1][1].write(post(b"1"))
            await silent[1][0].readuntil(b"}")
            silent[2][1].write(post(b"2")[:20])
            silent[3][1].write(post(b"3" * 100)[:-50])
            await until(lambda: [c._phase.name for c in s.connections].count("BODY") == 1)
            for _ in range(4):
                assert parse(await s.raw(post(b"new", close=True)))[0][0] == 200
                await until(lambda: len(s.connections) < 4)
                silent.append(await s.connect())
                await until(lambda: len(s.connections) == 4)
            ends = [await asyncio.wait_for(reader.read(), 20) for reader, _ in silent[:4]]
            assert ends[1] == b"" and all(refused(ends[i], 503, "too many connections") for i in (0, 2, 3))
            for _, writer in silent:
                writer.close()

    run(main())


def test_a_connection_that_is_answered_makes_room_for_nobody(run):
    async def main():
        go, began = asyncio.Event(), asyncio.Event()

        async def slow(call):
            body = await call.read()
            began.set()
            await go.wait()
            await call.reply(200, {}, body)

        async with served(slow, max_connections=1) as s:
            reader, writer = await s.connect()
            writer.write(post(b"first", close=True))
            await began.wait()
            answer = await s.raw(b"")
            assert refused(answer, 503, "too many connections") and parse(answer)[0][1]["retry-after"] == "1"
            go.set()
            assert parse(await reader.read())[0][2] == b"first"
            writer.close()
            await until(lambda: not s.connections)
            assert parse(await s.raw(post(b"second", close=True)))[0][0] == 200

    run(main())


def test_connections_of_one_address_are_limited(run):
    async def main():
        async with served(max_connections_per_address=1) as s:
            reader, writer = await s.connect()
            await until(lambda: len(s.connections) == 1)
            assert refused(await s.raw(b""), 503, "too many connections")
            writer.write(post(b"here", close=True))
            assert parse(await reader.read())[0][0] == 200
            writer.close()

    run(main())


@pytest.mark.parametrize("path", [PATH, "/typed"])
def test_bodies_share_one_budget_and_the_largest_unfinished_one_gives_way(run, path):
    async def main():
        async with served(max_body_memory=100_000) as s:
            large = [await s.connect() for _ in range(3)]
            for number, (_, writer) in enumerate(large):
                writer.write(post(b"x" * 200_000, path=path)[: 40_000 + 1_000 * number])
            ends = [asyncio.create_task(reader.read()) for reader, _ in large]
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED, timeout=20)
            assert refused(done.pop().result(), 503, "more than 100000 bytes (--max-body-memory)")
            assert parse(await s.raw(post(b"x" * 10_000, path=path, close=True)))[0][0] == 200
            for _, writer in large:
                writer.close()
            await until(lambda: not s.connections)
            assert s.server.server_state.bodies.used == 0
            # Their bytes are returned: one after another, as many as one address may have at a time.
            for _ in range(3):
                assert parse(await s.raw(post(b"x" * 70_000, path=path, close=True)))[0][0] == 200

    run(main())


def test_inflated_bytes_count_as_those_that_were_sent(run):
    async def main():
        async with served(max_body_memory=100_000) as s:
            bomb = post(gzip.compress(b"x" * 900_000), "Content-Encoding: gzip")
            assert refused(await s.raw(bomb), 503, "more than 100000 bytes (--max-body-memory)")
            assert s.server.server_state.bodies.used == 0

    run(main())


def test_inflated_bodies_whose_handlers_wait_hold_their_bytes_and_the_next_is_refused(run):
    """Nobody reads them further, so they give way to no other: the earlier ones are the larger ones."""

    async def main():
        held, go = [], asyncio.Event()

        async def serve(call):
            held.append(len(await call.read()))
            await go.wait()
            await call.reply(200, {}, b"")

        async with served(serve, max_body_memory=1_000_000) as s:
            asked = []
            for number in range(8):
                packed = gzip.compress(b"x" * (230_000 - number))
                asked.append(asyncio.create_task(s.raw(post(packed, "Content-Encoding: gzip", close=True))))
                await until(lambda: len(held) + sum(one.done() for one in asked) == len(asked))
            # Of one address three quarters of the budget.
            assert len(held) == 3 and sum(held) <= s.server.server_state.bodies.used <= 750_000
            go.set()
            statuses = [parse(answer)[0][0] for answer in await asyncio.gather(*asked)]
            assert statuses == [200] * 3 + [503] * 5

    run(main())


def test_a_body_that_its_handler_has_dropped_holds_nothing_while_the_answer_waits(run):
    """Sixteen bodies of 16 MB whose answers waited for a row kept everybody's out, for as long as they waited."""

    async def main():
        held, go = [], asyncio.Event()

        async def serve(call):
            held.append(len(await call.read()))
            call.drop()
            await go.wait()
            await call.reply(200, {}, b"")

        async with served(serve, max_body_memory=100_000) as s:
            asked = []
            for _ in range(4):
                asked.append(asyncio.create_task(s.raw(post(b"x" * 60_000, close=True))))
                await until(lambda: len(held) == len(asked))
            assert s.server.server_state.bodies.used == 0
            go.set()
            assert [parse(answer)[0][0] for answer in await asyncio.gather(*asked)] == [200] * 4

    run(main())


def test_what_was_refused_leaves_no_bytes_behind(run):
    """Nor a cycle that would keep them until the collector comes by, which is seldom in a router."""

    async def main():
        async with served(max_body_memory=500_000) as s:
            bomb = post(gzip.compress(b"x" * 900_000), "Content-Encoding: gzip", close=True)

            async def ask(times):
                for _ in range(times):
                    assert refused(await s.raw(bomb), 503, "--max-body-memory")
                await until(lambda: not s.connections)

            await ask(1)  # what is made once
            gc.collect()
            gc.disable()
            tracemalloc.start()
            try:
                await ask(8)
                assert tracemalloc.get_traced_memory()[0] < 1_000_000
            finally:
                tracemalloc.stop()
                gc.enable()

    run(main())


@pytest.mark.parametrize("path", PATHS[:3])
def test_a_body_of_small_chunks_has_a_bound(run, path):
    async def main():
        async with served() as s:
            head = chunked(path=path, end=False)
            tiny, usual = b"1\r\na\r\n", b"50\r\n" + b"b" * 80 + b"\r\n"
            assert refused(await s.raw(head + tiny * 5000 + b"0\r\n\r\n"), 400, "send larger chunks")
            if path == PATH:
                body = head + tiny * 2000 + usual * 10_000 + tiny * 2000 + b"0\r\n\r\n"
                assert parse(await s.raw(body.replace(b"Host", b"Connection: close\r\nHost")))[0][0] == 200

    run(main())


def test_what_inflates_to_much_does_so_off_the_event_loop(run, monkeypatch):
    on_loop = []

    class Noted:
        def __init__(self, wbits) -> None:
            self.inner = real(wbits)

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def decompress(self, data, most):
            found = self.inner.decompress(data, most)
            if threading.current_thread() is threading.main_thread():
                on_loop.append(len(found))
            return found

    real = zlib.decompressobj
    monkeypatch.setattr(zlib, "decompressobj", Noted)
    body = b"x" * BODY_LIMIT

    async def main():
        async with served() as s:
            answer = await s.raw(post(gzip.compress(body), "Content-Encoding: gzip", close=True))
            assert json.loads(parse(answer)[0][2])["body"] == body.decode()

    run(main())
    assert max(on_loop) <= 64 << 10 and sum(on_loop) < len(body)


def test_a_handler_is_told_why_a_body_came_to_nothing(run):
    """What it counts is a request that was too slow, and not a client that left."""
    told = []

    async def serve(call):
        try:
            await call.read()
        except BaseException as error:
            told.append(error)
            raise

    async def main():
        async with served(serve, arrival_s=0.05) as s:
            assert refused(await s.raw(post(b"{}")[:-1]), 408, "did not arrive")
            await until(lambda: not s.connections)

    run(main())
    assert [error.status for error in told] == [408]


@pytest.mark.slow
def test_what_a_client_sends_ahead_is_bounded(run):
    async def main():
        go, began = asyncio.Event(), asyncio.Event()

        async def serve(call):
            began.set()
            await go.wait()
            await echo(call)

        async with served(serve) as s:
            reader, writer = await s.connect()
            writer.write(post(b"1"))
            await began.wait()
            many = 400
            writer.write(post(b"y" * 60_000) * many + post(b"z", close=True))
            (connection,) = s.connections
            await until(lambda: connection.flow.read_paused)
            assert sum(len(cycle.body) for cycle, _ in connection.pipeline) < 1 << 19
            go.set()
            answers = parse(await asyncio.wait_for(reader.read(), 30))
            writer.close()
            assert len(answers) == many + 2 and json.loads(answers[-1][2])["body"] == "z"
            # A read may hold thousands of small ones.
            go.clear()
            began.clear()
            reader, writer = await s.connect()
            writer.write(post(b"1"))
            await began.wait()
            writer.write(post(b"") * 1000)
            (connection,) = s.connections
            await until(lambda: connection.refusal is not None)
            go.set()
            answer = await asyncio.wait_for(reader.read(), 30)
            assert len(parse(answer)) < 100 and refused(answer, 400, "before the first was answered")
            writer.close()

    run(main())


def test_requests_sent_ahead_may_have_heads_of_any_size_that_one_may_have(run):
    """Six of 4 KB, as of a client with many cookies: together more than one head may have."""

    async def main():
        async with served() as s:
            large = [post(b"%d" % i, "Cookie: " + "y" * 4000, close=i == 6) for i in range(7)]
            answers = parse(await s.raw(b"".join(large)))
            assert [json.loads(body)["body"] for _, _, body in answers] == list("0123456")
            assert refused(
                await s.raw(large[0] + post(b"", "Cookie: " + "y" * (16 << 10))), 431, "more than 16384 bytes"
            )
            await until(lambda: not s.connections)
            assert s.server.server_state.bodies.used == 0

    run(main())


@pytest.mark.parametrize("drops", [True, False])
def test_what_waits_behind_a_request_counts_until_its_own_turn(run, drops):
    """Its bytes had gone with those of the one before it, when that was planned: as many as one read holds, uncounted
    for as long as the first answer took."""

    async def main():
        went, go = [], [asyncio.Event() for _ in range(3)]

        async def serve(call):
            size = len(await call.read())
            if drops:
                call.drop()
            went.append(size)
            await go[len(went) - 1].wait()
            await call.reply(200, {}, b"")

        async with served(serve) as s:
            bodies = s.server.server_state.bodies
            reader, writer = await s.connect()
            sizes = [10_000, 20_000, 5_000]
            writer.write(b"".join(post(b"x" * size, close=size == 5_000) for size in sizes))
            for turn in range(3):
                await until(lambda turn=turn: len(went) > turn)
                counted = sum(sizes[turn + drops :])
                assert counted <= bodies.used <= counted + 2000, (turn, bodies.used)
                go[turn].set()
            assert [each[0] for each in parse(await reader.read())] == [200] * 3
            writer.close()
            assert bodies.used == 0

    run(main())


def test_nonsense_behind_requests_that_wait_takes_no_answer_from_them(run):
    async def main():
        async with served() as s:
            answer = await s.raw(post(b"first") + post(b"second") + post(b"third") + b"nonsense\r\n\r\n")
            *good, _ = parse(answer)
            assert [json.loads(body)["body"] for _, _, body in good] == ["first", "second", "third"]
            assert refused(answer, 400, "not HTTP/1.1")

    run(main())


@pytest.mark.parametrize("streamed", [False, True])
def test_nonsense_behind_a_request_waits_for_its_answer(run, streamed):
    async def main():
        go, began = asyncio.Event(), asyncio.Event()

        async def serve(call):
            if streamed:
                await call.begin({"x-request-id": "r"})
                await call.write(b"begun")
            began.set()
            await go.wait()
            if streamed:
                await call.end()
            else:
                await echo(call)

        async with served(serve) as s:
            reader, writer = await s.connect()
            writer.write(post(b"first") + b"nonsense\r\n\r\n")
            await began.wait()
            go.set()
            answer = await reader.read()
            writer.close()
            first, _, last = answer.partition(b"0\r\n\r\n" if streamed else b'"first"}')
            assert first.startswith(b"HTTP/1.1 200") and refused(last, 400, "not HTTP/1.1")

    run(main())


def test_nonsense_behind_a_head_request_waits_for_its_answer(run, caplog):
    async def main():
        async with served() as s:
            answer = await s.raw(b"HEAD /nothing HTTP/1.1\r\nHost: x\r\n\r\nnonsense\r\n\r\n")
            first, _, last = answer.partition(b"\r\n\r\n")
            assert first.startswith(b"HTTP/1.1 404 ") and refused(last, 400, "not HTTP/1.1"), answer

    run(main())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# ------------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_cancels_its_call(run, streamed):
    async def main():
        began, ended = asyncio.Event(), asyncio.get_running_loop().create_future()

        async def serve(call):
            try:
                if streamed:
                    await call.begin({})
                    await call.write(b"first")
                began.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.set_result(call.begun)
                raise

        async with served(serve) as s:
            _, writer = await s.connect()
            writer.write(post())
            await began.wait()
            writer.close()
            assert await asyncio.wait_for(ended, 20) is streamed

    run(main())


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_only_closes_its_side_gets_its_answer(run, streamed):
    async def main():
        began, go_on = asyncio.Event(), asyncio.Event()

        async def serve(call):
            await call.read()
            if streamed:
                await call.begin({})
                await call.write(b"first")
            began.set()
            await go_on.wait()
            if not streamed:
                await call.begin({})
            await call.write(b"second")
            await call.end()

        async with served(serve) as s:
            reader, writer = await s.connect()
            writer.write(post())
            await began.wait()
            (connection,) = s.connections
            with serving.looking() as looked:
                writer.write_eof()
                await asyncio.wait_for(looked.wait(), 20)
            assert connection.half_closed
            go_on.set()
            answer = await asyncio.wait_for(reader.read(), 20)
            writer.close()
            if not streamed:
                interim, _, answer = answer.partition(b"\r\n\r\n")
                assert interim == b"HTTP/1.1 100 Continue"
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ") and (streamed or b"\r\nconnection: close" in head)
            assert dechunked(body) == ([b"first"] if streamed else []) + [b"second"]
            await until(lambda: not s.connections)

    run(main())


def dechunked(data):
    """Chunks up to the last one, behind which nothing may follow (RFC 9112, 7.1)."""
    found = []
    while True:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            assert data == b"\r\n"
            return found
        found.append(data[:length])
        assert data[length : length + 2] == b"\r\n"
        data = data[length + 2 :]


@pytest.mark.parametrize(
    "rest", [b"", b"POST /v1/comp", post(b"1234")[:-1]], ids=["nothing", "half a head", "half a body"]
)
def test_what_came_whole_before_the_client_closed_its_side_is_answered(run, rest):
    async def main():
        go_on = asyncio.Event()

        async def serve(call):
            await go_on.wait()
            await echo(call)

        async with served(serve) as s:
            reader, writer = await s.connect()
            writer.write(post(b"first") + post(b"second") + rest)
            writer.write_eof()
            await until(lambda: s.connections)
            (connection,) = s.connections
            await until(lambda: connection.pipeline)
            go_on.set()
            data = await asyncio.wait_for(reader.read(), 20)
            writer.close()
            answers = parse(data.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b""))
            assert [json.loads(body)["body"] for _, _, body in answers] == ["first", "second"]
            await until(lambda: not s.connections)

    run(main())


def test_a_client_that_closes_its_side_and_leaves_later_cancels_its_call(run):
    async def main():
        serve, began, ended = endless()
        async with served(serve) as s:
            _, writer = await s.connect()
            writer.write(post())
            await began.wait()
            (connection,) = s.connections
            writer.write_eof()
            await until(lambda: connection.half_closed)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            await asyncio.wait_for(ended.wait(), 20)

    run(main())


def test_a_client_of_http_1_0_that_closes_its_side_has_left(run):
    async def main():
        serve, began, ended = endless()
        async with served(serve) as s:
            reader, writer = await s.connect()
            writer.write(post(version="1.0"))
            await began.wait()
            writer.write_eof()
            await asyncio.wait_for(ended.wait(), 20)
            assert await asyncio.wait_for(reader.read(), 20) == b""
            writer.close()

    run(main())


def test_a_slow_reader_slows_the_call_and_its_leaving_ends_it(run):
    async def main():
        written, outcome = 0, asyncio.get_running_loop().create_future()

        async def serve(call):
            nonlocal written
            await call.begin({})
            try:
                for _ in range(1000):
                    written += 1
                    await call.write(b"x" * (1 << 18))
                await call.end()
            except (ConnectionResetError, asyncio.CancelledError) as e:
                outcome.set_result(type(e))
                raise

        async with served(serve) as s:
            reader, writer = await s.connect()
            writer.write(post())
            await reader.read(1000)
            (connection,) = s.connections
            await until(lambda: connection.flow.write_paused)
            assert written < 500  # of 1000: what the sockets hold
            writer.transport.abort()
            assert await asyncio.wait_for(outcome, 20) in (asyncio.CancelledError, ConnectionResetError)

    run(main())


def test_streams_are_chunked(run):
    async def main():
        async def serve(call):
            assert not call.begun
            await call.begin({"Content-Type": "text/event-stream"})
            assert call.begun
            for i in range(3):
                await call.write(b"%d\n" % i)
            await call.write(b"")  # would end the stream if it were sent
            await call.write(b"x" * 100_000)
            await call.end()

        async with served(serve) as s, aiohttp.ClientSession() as session:
            for _ in range(2):
                async with session.post(f"http://127.0.0.1:{s.port}{PATH}") as answer:
                    assert answer.headers["Transfer-Encoding"] == "chunked"
                    assert await answer.read() == b"0\n1\n2\n" + b"x" * 100_000
            assert len(s.connections) == 1

    run(main())


@pytest.mark.parametrize("begun", [False, True])
def test_a_handler_that_breaks_is_an_error_or_a_cut_connection(run, begun, caplog):
    async def main():
        async def serve(call):
            if begun:
                await call.begin({})
                await call.write(b"some")
            raise KeyError("secret")

        async with served(serve) as s:
            answer = b""
            with suppress(ConnectionResetError):
                answer = await s.raw(post(close=True))
                assert b"secret" not in answer and not answer.endswith(b"0\r\n\r\n")
            assert begun or parse(answer)[0][0] == 500
            await until(lambda: not s.connections)

    with caplog.at_level(logging.ERROR):
        run(main())
    assert f"POST {PATH} failed" in caplog.text


# --------------------------------------------------------------------------------------------------------------- drain


def app_task(serve, **settings):
    """`run_app` in a task: (task, stop, port)."""
    port = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    work = run_app(
        application(serve), host="127.0.0.1", port=0, stop=stop, on_started=port.set_result,
        **{"drain_timeout_s": 20.0, **settings},
    )  # fmt: skip
    return asyncio.create_task(work), stop, port


def test_a_drain_ends_idle_connections_and_finishes_calls(run):
    async def main():
        in_flight, began, go = serving.Drained(), asyncio.Event(), asyncio.Event()

        async def serve(call):
            with in_flight.track():
                began.set()
                await go.wait()
            await echo(call)

        task, stop, port = app_task(serve, in_flight=in_flight)
        busy, idle, late = [await asyncio.open_connection("127.0.0.1", await port) for _ in range(3)]
        busy[1].write(post(b"busy"))
        await began.wait()
        stop.set()
        await in_flight.began.wait()
        late[1].write(post(b"late"))
        answer = await late[0].readuntil(b"\r\n\r\n")  # new work is refused, on open connections too
        assert b" 503 " in answer and b"connection: close" in answer
        go.set()
        answer = await busy[0].read()
        assert b"busy" in answer and b"connection: close" in answer
        assert await idle[0].read() == b""
        await task
        for _, writer in (busy, idle, late):
            writer.close()

    run(main())


def test_a_call_that_does_not_end_is_cut_after_the_grace(run, monkeypatch):
    async def main():
        monkeypatch.setattr("isthmus_runtime.serving.server._ABORT_GRACE_S", 0.05)
        began = asyncio.Event()

        async def serve(call):
            began.set()
            await asyncio.Event().wait()

        task, stop, port = app_task(serve)
        reader, writer = await asyncio.open_connection("127.0.0.1", await port)
        writer.write(post())
        await began.wait()
        stop.set()
        await task
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()

    run(main())


async def large(call):
    """Answers with 8 MiB."""
    await call.read()
    await call.reply(200, {}, b"x" * (8 << 20))


def reader_of_nothing(port, head=b"", times=1, address="127.0.0.1"):
    """A connection that has asked so many times, and reads nothing of the answers."""
    sock = socket.socket()
    sock.bind((address, 0))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%bContent-Length: 0\r\n\r\n" % head * times)
    return sock


@pytest.mark.parametrize("lines", [5000, 130])
def test_a_head_of_many_lines_leaves_nothing_while_its_connection_lingers(run, lines):
    """Each took 48 bytes and its text."""

    async def main():
        async with served() as there:
            reader, writer = await there.connect()
            writer.write(b"GET / HTTP/1.1\r\n" + b"a:\r\n" * lines)
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 431 ")
            (connection,) = there.connections
            assert connection._deaf and not connection.headers
            writer.close()

    run(main())


@pytest.mark.parametrize(("head", "times"), [(b"", 1), (b"", 2), (b"Connection: close\r\n", 1)])
def test_an_answer_of_which_nothing_is_read_ends(run, head, times):
    """Its connection stayed for good: closing it waited for the rest to be read."""

    async def main():
        async with served(large, stuck_s=0.2) as there:
            with reader_of_nothing(there.port, head, times):
                await until(lambda: any(c.unread for c in there.connections))
                await until(lambda: not there.connections)

    run(main())


@pytest.mark.parametrize("sweep_s", [0.05, 1e6], ids=["by the sweep", "as they are written"])
def test_whole_answers_that_nobody_reads_are_bounded_together(run, sweep_s):
    answered = 0

    async def counted(call):
        nonlocal answered
        await large(call)
        answered += 1

    async def main():
        async with served(counted, max_unread=20 << 20, sweep_s=sweep_s) as there:
            with ExitStack() as clients:
                for _ in range(6):
                    clients.enter_context(reader_of_nothing(there.port))
                await until(lambda: answered == 6)
                await until(lambda: len(there.connections) < 6)
                await until(lambda: sum(c.unread for c in there.connections) <= 20 << 20)
                assert len(there.connections) > 1, "no more of them than there must"
                assert await there.raw(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")

    run(main())


def test_of_answers_that_nobody_reads_the_largest_of_the_client_with_most_gives_way(run):
    """And not who has one large one."""

    async def by_address(call):
        await call.read()
        await call.reply(200, {}, b"x" * (8 << (20 + (call.client.host == "127.0.0.2"))))

    async def main():
        async with served(by_address) as there:
            state = there.server.server_state
            unread = lambda who: [c.unread for c in there.connections if c.who == who]  # noqa: E731
            with ExitStack() as clients:
                for address in ("127.0.0.2", *["127.0.0.1"] * 4):
                    clients.enter_context(reader_of_nothing(there.port, address=address))
                await until(lambda: len(there.connections) == 5 and all(c.unread for c in there.connections))
                assert max(unread("127.0.0.1")) < sum(unread("127.0.0.2")) < sum(unread("127.0.0.1"))
                state.limits = replace(state.limits, max_unread=sum(c.unread for c in there.connections) - 1)
                state.bound_unread()
                await until(lambda: len(there.connections) == 4)
                assert len(unread("127.0.0.2")) == 1

    run(main())
