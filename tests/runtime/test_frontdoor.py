"""The router's front door: same answers as aiohttp for everything it takes, and everything else is aiohttp's."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from contextlib import asynccontextmanager, suppress

import aiohttp
import pytest
import uvloop
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus_runtime import frontdoor
from isthmus_runtime.calls import BodyTooLarge, error_answer, web_handler
from isthmus_runtime.frontdoor import FrontDoor
from isthmus_runtime.httpd import InFlight, error_middleware, run_app

PATH = "/v1/completions"


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    factory = uvloop.new_event_loop if request.param == "uvloop" else None

    def go(work):
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(asyncio.wait_for(work, 60))

    return go


async def echo(call):
    """Answers with what it got."""
    try:
        body = await call.read(1 << 20)
    except BodyTooLarge as e:
        call.reply(*error_answer(e))
        return
    got = {"path": call.path, "authorization": call.authorization, "body": body.decode("latin-1")}
    call.reply(200, {"Content-Type": "application/json", "X-Request-Id": "r"}, json.dumps(got).encode())


class Served:
    def __init__(self, port, door, calls) -> None:
        self.port = port
        self.door = door
        self.calls = calls
        """Calls that did not pass through aiohttp."""

    async def connect(self):
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def raw(self, data):
        """All bytes that come back for `data` on a connection, whose end we announce with the last request."""
        reader, writer = await self.connect()
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        return answer


@asynccontextmanager
async def served(serve=echo, *, hot=True, **limits):
    """A port with a door before aiohttp, or with aiohttp alone."""
    app = web.Application(middlewares=[error_middleware])
    app.router.add_post(PATH, web_handler(serve))
    app.router.add_get("/health", web_handler(echo))
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    calls = []

    async def counted(call):
        calls.append(call.path)
        await serve(call)

    door = FrontDoor({PATH: counted}, runner.server, **limits) if hot else None
    server = await asyncio.get_running_loop().create_server(door or runner.server, "127.0.0.1", 0)
    try:
        yield Served(server.sockets[0].getsockname()[1], door, calls)
    finally:
        server.close()
        if door is not None:
            await door.close(1.0)
        await runner.cleanup()


def post(body=b"{}", *fields, path=PATH, close=False, version="1.1"):
    lines = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(body)}", *fields]
    if close:
        lines.append("Connection: close")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


async def until(condition):
    """The test's own deadline bounds this."""
    while True:
        if condition():
            return
        await asyncio.sleep(0)


def parse(answer):
    """[(status, headers, body)] of whole answers with a Content-Length."""
    found = []
    while answer:
        head, _, rest = answer.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
        length = int(headers["content-length"])
        found.append((int(first.split()[1]), headers, rest[:length]))
        answer = rest[length:]
    return found


def test_a_connection_serves_one_call_after_another(run):
    async def main():
        async with served() as s, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
            for i in range(5):
                async with session.post(
                    f"http://127.0.0.1:{s.port}{PATH}", data=b"x" * i, headers={"Authorization": "Bearer ä"}
                ) as answer:
                    assert answer.status == 200 and answer.headers["X-Request-Id"] == "r" and answer.headers["Date"]
                    assert (await answer.json())["body"] == "x" * i
            assert s.calls == [PATH] * 5 and s.door.count == 1
            ((status, headers, body),) = parse(await s.raw(post(b"last", close=True)))
            assert status == 200 and headers["connection"] == "close" and json.loads(body)["body"] == "last"

    run(main())


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
            assert len(s.calls) == len(bodies)

    asyncio.run(main())


OTHERS = {
    "get": b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "other path": post(path="/v1/nothing", close=True),
    "query": post(path=PATH + "?a=1", close=True),
    "absolute form": post(path=f"http://x{PATH}", close=True),
    "escaped path": post(path="/v1/%63ompletions", close=True),
    "http/1.0": post(version="1.0"),
    "lower case": post(close=True).replace(b"POST", b"post"),
    "chunked": post(b"3\r\nabc\r\n0\r\n\r\n", close=True).replace(b"Content-Length: 13", b"Transfer-Encoding: chunked"),
    "chunked and length": post(b"0\r\n\r\n", "Transfer-Encoding: chunked", close=True),
    "two lengths": post(b"{}", "Content-Length: 2", close=True),
    "two different lengths": post(b"{}", "Content-Length: 1", close=True),
    "length with a sign": post(b"{}", close=True).replace(b"Length: 2", b"Length: +2"),
    "length with an underscore": post(b"0123456789", close=True).replace(b"Length: 10", b"Length: 1_0"),
    "no length": post(b"", close=True).replace(b"Content-Length: 0\r\n", b""),
    "space before the colon": post(b"{}", close=True).replace(b"Length:", b"Length :"),
    "folded line": post(b"{}", "X: a\r\n b", close=True),
    "bare line feed": post(b"{}", "X: a\nY: b", close=True),
    "only line feeds": post(b"{}", close=True).replace(b"\r\n", b"\n"),
    "control character": post(b"{}", "X: a\0b", close=True),
    "gzip": post(gzip.compress(b"hello", mtime=0), "Content-Encoding: gzip", close=True),
    "broken gzip": post(b"hello", "Content-Encoding: gzip", close=True),
    "large body": post(b"x" * (frontdoor.MAX_BODY + 1), close=True),
    "too large a body": post(b"x" * ((1 << 20) + 1), close=True),
    "large head": post(b"{}", "X: " + "y" * frontdoor.MAX_HEAD, close=True),
    "no http": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n",
    "two hosts": post(b"{}", "Host: y", close=True),
    "no host": post(b"{}", close=True).replace(b"Host: x\r\n", b""),
    "two authorizations": post(b"{}", "Authorization: a", "Authorization: b", close=True),
    "connection tokens": post(b"{}", "Connection: keep-alive, close"),
    "trailer": post(b"{}", "Trailer: X", close=True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_form_is_answered_by_aiohttp_as_without_a_door(run, name):
    async def main():
        async with served() as with_door, served(hot=False) as without:
            mine, theirs = await with_door.raw(OTHERS[name]), await without.raw(OTHERS[name])
            assert with_door.calls == []
            assert [a[::2] for a in parse(mine)] == [a[::2] for a in parse(theirs)]
            assert mine and (b"aiohttp" in mine) == (b"aiohttp" in theirs)

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
            assert status == 200 and json.loads(answer)["body"] == "abc" and s.calls == []

    run(main())


FIELD = st.sampled_from(
    ["X: y", "Content-Length: 2", "Content-Length: 3", "Transfer-Encoding: chunked", "transfer-encoding: identity",
     "Host: z", "Connection: keep-alive", "Connection: upgrade", "Upgrade: h2c", "Expect: x", "A\tB: c", " X: y", "X",
     "X:", "X:y\x7f", "Content-Encoding: identity", "Accept: */*", "Content-Type: application/json", "TE: trailers",
     "Cookie: a", "Cookie: b"]
)  # fmt: skip


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    fields=st.lists(FIELD, max_size=3), swap=st.booleans(), tail=st.sampled_from([b"", b"\r\n", b"GET / HTTP/1.1\r\n"])
)
def test_no_head_means_something_else_than_to_aiohttp(fields, swap, tail):
    head = ["Host: x", "Content-Length: 2", "Connection: close", *fields]
    lines = [f"POST {PATH} HTTP/1.1", *(reversed(head) if swap else head)]
    data = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n{}" + tail

    async def main():
        async with served() as with_door, served(hot=False) as without:
            mine, theirs = await with_door.raw(data), await without.raw(data)
            assert [a[::2] for a in parse(mine)][:1] == [a[::2] for a in parse(theirs)][:1]

    asyncio.run(main())


def test_a_connection_changes_hands_between_calls(run):
    async def main():
        async with served() as s:
            reader, writer = await s.connect()
            # One write: what belongs to aiohttp is in the buffer already when the first call ends.
            writer.write(post(b"1") + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + post(b"2", close=True))
            answers = parse(await asyncio.wait_for(reader.read(), 20))
            writer.close()
            assert [json.loads(a[2])["body"] for a in answers] == ["1", "", "2"]
            assert s.calls == [PATH] and s.door.count == 1  # aiohttp's, until the next sweep

    run(main())


def test_a_request_that_does_not_arrive_is_refused(run):
    async def main():
        async with served(arrival_s=0.05, sweep_s=0.02) as s:
            for part in (post(b"{}")[:-1], post(b"{}")[:20], b"P"):
                ((status, headers, body),) = parse(await s.raw(part))
                assert status == 408 and headers["connection"] == "close"
                assert "did not arrive within 0.05 s" in json.loads(body)["error"]["message"]

    run(main())


def test_idle_connections_are_closed(run):
    async def main():
        async with served(keep_alive_s=0.05, sweep_s=0.02) as s:
            assert await s.raw(b"") == b""  # one that never sends
            ((status, _, _),) = parse(await s.raw(post(b"{}")))  # ours to close, not the client's
            assert status == 200 and s.door.count == 0

    run(main())


def test_a_call_may_last_longer_than_both(run):
    async def main():
        swept = asyncio.Event()

        async def slow(call):
            await swept.wait()
            await echo(call)

        async with served(slow, keep_alive_s=0.01, arrival_s=0.01, sweep_s=0.01) as s:
            answer = asyncio.create_task(s.raw(post(b"{}", close=True)))
            assert await s.raw(b"P")  # refused as too slow: a sweep has been
            swept.set()
            assert parse(await answer)[0][0] == 200

    run(main())


def test_connections_are_limited(run):
    async def main():
        async with served(max_connections=2) as s:
            one, two = await s.connect(), await s.connect()
            one[1].write(post(b"1"))
            await one[0].readuntil(b"}")
            two[1].write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")  # aiohttp's count as well
            await two[0].readuntil(b"}")
            ((status, headers, _),) = parse(await s.raw(b""))
            assert status == 503 and headers["retry-after"] == "1"
            one[1].close()
            await one[1].wait_closed()
            await until(lambda: s.door.count < 2)
            assert parse(await s.raw(post(b"3", close=True)))[0][0] == 200
            two[1].close()

    run(main())


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
            assert s.calls == [PATH]

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
            (connection,) = s.door._own
            await until(lambda: connection._drained is not None)
            assert written < 500  # of 1000: what the sockets hold
            writer.transport.abort()
            assert await asyncio.wait_for(outcome, 20) is asyncio.CancelledError

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
            assert len(s.calls) == 2 and s.door.count == 1

    run(main())


@pytest.mark.parametrize("begun", [False, True])
def test_a_handler_that_breaks_cuts_the_connection(run, begun, caplog):
    async def main():
        async def serve(call):
            if begun:
                await call.begin({})
                await call.write(b"some")
            raise KeyError("bug")

        async with served(serve) as s:
            with suppress(ConnectionResetError):
                answer = await s.raw(post())
                assert not answer.endswith(b"0\r\n\r\n")
            assert s.door.count == 0

    with caplog.at_level(logging.ERROR):
        run(main())
    assert "a handler let an exception out" in caplog.text


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
            (connection,) = s.door._own
            await until(lambda: connection._held)
            assert len(connection._buffer) < frontdoor.MAX_BODY + (1 << 19)
            go.set()
            answers = parse(await asyncio.wait_for(reader.read(), 30))
            writer.close()
            assert len(answers) == many + 2 and json.loads(answers[-1][2])["body"] == "z"

    run(main())


def app_task(serve, **settings):
    """`run_app` with a door, in a task: (task, stop, port)."""
    port = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    app = web.Application(middlewares=[error_middleware])
    app.router.add_post(PATH, web_handler(serve))
    work = run_app(
        app, host="127.0.0.1", port=0, hot={PATH: serve}, stop=stop, on_started=port.set_result,
        **{"drain_timeout_s": 20.0, **settings},
    )  # fmt: skip
    return asyncio.create_task(work), stop, port


def test_a_drain_ends_idle_connections_and_finishes_calls(run):
    async def main():
        in_flight, began, go, draining = InFlight(), asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def serve(call):
            try:
                with in_flight.track():
                    began.set()
                    await go.wait()
            except Exception as e:
                call.reply(*error_answer(e))
                return
            await echo(call)

        task, stop, port = app_task(serve, in_flight=in_flight, on_drain=draining.set)
        busy, idle, late = [await asyncio.open_connection("127.0.0.1", await port) for _ in range(3)]
        busy[1].write(post(b"busy"))
        await began.wait()
        stop.set()
        await draining.wait()
        late[1].write(post(b"late"))
        assert b" 503 " in await late[0].readuntil(b"\r\n\r\n")  # new work is refused, on open connections too
        go.set()
        assert b"busy" in await busy[0].read()
        assert await idle[0].read() == b""
        await task
        for _, writer in (busy, idle, late):
            writer.close()

    run(main())


def test_a_call_that_does_not_end_is_cut_after_the_grace(run, monkeypatch):
    async def main():
        monkeypatch.setattr("isthmus_runtime.httpd._ABORT_GRACE_S", 0.05)
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
