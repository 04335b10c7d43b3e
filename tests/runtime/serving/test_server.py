"""`run_app`: error bodies, drain, port conflicts, signals; and the pages that every role has."""

import asyncio
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import AsyncExitStack

import aiohttp
import pytest
import serving
from fastapi import Request
from starlette.responses import PlainTextResponse, Response

from isthmus_runtime.errors import ConfigError, Overloaded, TransferFailed
from isthmus_runtime.serving import app as serving_app
from isthmus_runtime.serving.app import add_pages, make_app
from isthmus_runtime.serving.call import Call, add_call_route
from isthmus_runtime.serving.limits import Limits
from isthmus_runtime.serving.server import beside, run_app


def run(work):
    return asyncio.run(asyncio.wait_for(work, 30))


class Server:
    """`run_app` in a task, over one handler."""

    def __init__(self, handler, **settings) -> None:
        self.in_flight = serving.Drained()
        self.stop = asyncio.Event()
        self.port = asyncio.get_running_loop().create_future()
        app = make_app("test", bodies=())

        async def handle(request: Request) -> Response:
            return await handler(request)

        async def probe() -> Response:
            return PlainTextResponse("alive")

        app.add_api_route("/", handle)
        app.add_api_route("/health", probe)
        settings = {"host": "127.0.0.1", "port": 0, "drain_timeout_s": 20.0, "limits": Limits(sweep_s=0.0), **settings}
        self.task = asyncio.create_task(
            run_app(
                app,
                in_flight=self.in_flight,
                stop=self.stop,
                on_started=self.port.set_result,
                **settings,
            )
        )

    async def url(self, path="/"):
        return f"http://127.0.0.1:{await self.port}{path}"


def test_bad_http_of_a_client_is_one_line_in_the_log(caplog):
    async def handler(request):
        return PlainTextResponse(await request.body())

    async def main():
        server = Server(handler)
        reader, writer = await asyncio.open_connection("127.0.0.1", await server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"400"
        writer.close()
        server.stop.set()
        await server.task

    with caplog.at_level("INFO"):
        run(main())
    bad = [r for r in caplog.records if "a client sent a bad request" in r.getMessage()]
    assert len(bad) == 1 and not any(r.exc_info for r in caplog.records)


async def get(url):
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, answer.headers, await answer.text()


def test_errors_of_handlers():
    async def main():
        async def handler(request):
            raise {"ours": TransferFailed("lost", stage="SENDING"), "busy": Overloaded("full", retry_after_s=0.2)}.get(
                request.query_params["what"], KeyError("secret")
            )

        server = Server(handler)
        status, _, body = await get(await server.url("/?what=ours"))
        assert status == 502 and json.loads(body)["error"]["stage"] == "SENDING"
        status, headers, _ = await get(await server.url("/?what=busy"))
        assert (status, headers["Retry-After"]) == (503, "1")
        status, _, body = await get(await server.url("/?what=bug"))
        assert status == 500 and "secret" not in body
        server.stop.set()
        await server.task

    run(main())


@pytest.mark.parametrize("written", [b"", b"some"])
def test_error_after_the_first_byte_breaks_the_connection(written):
    async def main():
        async def handler(call: Call) -> None:
            await call.begin({})
            await call.write(written)
            raise TransferFailed("lost")

        app = make_app("test", bodies=())
        add_call_route(app, "/", handler, "GET")
        async with serving.served(app) as port:
            with pytest.raises(aiohttp.ClientError):
                await get(f"http://127.0.0.1:{port}/")

    run(main())


def test_pieces_leave_at_once_while_their_client_keeps_up():
    async def main():
        full, gone = asyncio.Event(), asyncio.Event()
        sent: list[bytes] = []

        async def handler(call: Call) -> None:
            now = call.writer()
            await call.begin({})
            assert not now(b"nothing")  # the head waits for a piece that is sent
            await call.write(b"first")
            sent.append(b"first")
            piece = b"%06d" % 0 + b"x" * 100_000
            while now(piece):
                sent.append(piece)
                piece = b"%06d" % len(sent) + b"x" * 100_000
            full.set()
            await call.write(b"last")  # waits for the client
            sent.append(b"last")
            assert now(b"more")
            sent.append(b"more")
            await call.end()

        async def left(call: Call) -> None:
            now = call.writer()
            await call.begin({})
            await call.write(b"first")
            try:
                await asyncio.Event().wait()
            finally:
                with pytest.raises(ConnectionResetError):
                    now(b"second")
                gone.set()

        app = make_app("test", bodies=())
        add_call_route(app, "/", handler, "GET")
        add_call_route(app, "/left", left, "GET")
        async with serving.served(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
            writer.transport.pause_reading()
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            await full.wait()
            writer.transport.resume_reading()
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            got = []
            while size := int(await reader.readuntil(b"\r\n"), 16):
                got.append(await reader.readexactly(size))
                assert await reader.readexactly(2) == b"\r\n"
            assert got == sent and got[-2:] == [b"last", b"more"] and len(got) > 4
            writer.write(b"GET /left HTTP/1.1\r\nHost: a\r\n\r\n")
            await reader.readuntil(b"first")
            writer.transport.abort()
            await gone.wait()

    run(main())


def test_calls_go_past_fastapi_but_not_past_our_middleware():
    async def handler(call: Call) -> None:
        if await call.read() == b"no":
            raise Overloaded("full", retry_after_s=2.0)
        await call.reply(200, {}, b"yes")

    async def main():
        app = make_app("test", bodies=(), cors_origins=("https://a",), max_body_bytes=5)
        add_call_route(app, "/call", handler, "POST")
        async with serving.served(app) as port, aiohttp.ClientSession() as session:

            async def post(body: bytes) -> tuple[int, str | None, str | None]:
                headers = {"Origin": "https://a"}
                async with session.post(f"http://127.0.0.1:{port}/call", data=body, headers=headers) as answer:
                    got = answer.headers
                    return answer.status, got.get("Access-Control-Allow-Origin"), got.get("Retry-After")

            assert await post(b"yes") == (200, "https://a", None)
            assert await post(b"no") == (503, "https://a", "2")
            assert await post(b"too long") == (413, "https://a", None)
            async with session.get(f"http://127.0.0.1:{port}/call") as answer:
                assert (answer.status, answer.headers["Allow"]) == (405, "POST")

    run(main())


def test_drain_lets_work_end_and_answers_probes():
    async def main():
        began, go, closing = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def handler(request):
            with server.in_flight.track():
                began.set()
                await go.wait()
                return PlainTextResponse("done")

        server = Server(handler, before_close=closing.wait)
        work = asyncio.create_task(get(await server.url()))
        await began.wait()
        server.stop.set()
        await server.in_flight.began.wait()
        assert (await get(await server.url("/health")))[2] == "alive"
        status, _, body = await get(await server.url())
        assert status == 503 and "shutting down" in body
        go.set()
        assert (await work)[2] == "done"
        assert (await get(await server.url("/health")))[2] == "alive"  # `before_close` has not returned yet
        closing.set()
        await server.task
        with pytest.raises(aiohttp.ClientConnectorError):
            await get(await server.url("/health"))

    run(main())


def test_drain_has_a_limit():
    async def main():
        began, ended = asyncio.Event(), []

        async def handler(request):
            try:
                with server.in_flight.track():
                    began.set()
                    await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.append(server.in_flight.aborting)
                asyncio.current_task().uncancel()
                raise server.in_flight.refusal() from None

        server = Server(handler, drain_timeout_s=0.05)
        work = asyncio.create_task(get(await server.url()))
        await began.wait()
        server.stop.set()
        await server.task
        assert (await work)[0] == 503 and ended == [True]

    run(main())


def test_a_server_whose_sweep_breaks_ends(monkeypatch):
    async def main():
        async def handler(request):
            return Response()

        server = Server(handler)
        reader, writer = await asyncio.open_connection("127.0.0.1", await server.port)
        monkeypatch.setattr("isthmus_runtime.serving.protocol.Protocol.check", lambda self, now: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await server.task
        assert await reader.read() == b""
        writer.close()

    run(main())


def test_a_port_of_probes_whose_sweep_breaks_ends_what_it_stands_beside(monkeypatch):
    async def main():
        async with asyncio.timeout(20):
            with pytest.raises(ZeroDivisionError):
                async with beside(make_app("test", bodies=()), host="127.0.0.1", port=0) as port:
                    monkeypatch.setattr("isthmus_runtime.serving.server.Server.on_tick", lambda self, counter: 1 / 0)
                    await asyncio.Event().wait()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)

    asyncio.run(main())


def test_port_in_use_names_port_and_flag():
    async def main():
        async def handler(request):
            return Response()

        first = Server(handler)
        port = await first.port
        with pytest.raises(ConfigError, match=f"--port {port} on 127.0.0.1 is already in use"):
            await Server(handler, port=port).task
        first.stop.set()
        await first.task

    run(main())


PROGRAM = """
import asyncio
from isthmus_runtime.serving.app import make_app
from isthmus_runtime.serving.in_flight import InFlight
from isthmus_runtime.serving.server import beside, run_app
class Busy(InFlight):
    def start_drain(self):
        if not self.draining:
            print("draining", flush=True)
        super().start_drain()
busy = Busy()
async def main():
    async def stuck():
        with busy.track():
            await asyncio.Event().wait()
    task = asyncio.ensure_future(stuck())
    await asyncio.sleep(0)
    await run_app(make_app("test", bodies=()), host="127.0.0.1", port=0, drain_timeout_s=60, in_flight=busy,
                  on_started=lambda p: print("up", flush=True))
    print("ended", flush=True)
    await asyncio.gather(task, return_exceptions=True)
asyncio.run(main())
"""


@pytest.mark.slow
def test_signals():
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        os.kill(process.pid, signal.SIGTERM)
        assert process.stdout.readline() == "draining\n"
        os.kill(process.pid, signal.SIGTERM)  # the second one does not wait
        assert process.stdout.readline() == "ended\n"
        assert process.wait(20) == 0


def test_pages_need_no_other_host():
    async def main():
        app = make_app("A title", bodies=())
        add_pages(app)
        async with serving.served(app) as port:
            url = f"http://127.0.0.1:{port}"
            _, _, page = await get(url + "/docs")
            assert "A title" in page
            links = re.findall(r"(?:src|href)=\"([^\"]*)\"", page)
            assert len(links) == 3
            for link in links:
                assert "://" not in link and not link.startswith("//")
                assert (await get_bytes(f"{url}/{link}"))[0] == 200, link
            assert "url: 'openapi.json'" in page
            status, _, body = await get(url + "/openapi.json")
            assert status == 200 and "/version" in json.loads(body)["paths"]
            _, _, body = await get(url + "/version")
            assert json.loads(body) == {"version": app.version}

    run(main())


async def get_bytes(url):
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.read()


@pytest.mark.parametrize(("origins", "allowed"), [((), None), (("https://a",), "https://a"), (("*",), "*")])
def test_pages_of_other_origins_are_let_in_only_where_told(origins, allowed):
    async def main():
        app = make_app("test", bodies=(), cors_origins=origins)
        add_pages(app)
        asked = {"Origin": "https://a", "Access-Control-Request-Method": "POST"}
        async with serving.served(app) as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            async with session.get("/version", headers={"Origin": "https://a"}) as answer:
                assert answer.headers.get("Access-Control-Allow-Origin") == allowed
            async with session.options("/version", headers=asked) as answer:
                assert (answer.status == 200) is bool(origins)
            async with session.get("/version", headers={"Origin": "https://b"}) as answer:
                assert answer.headers.get("Access-Control-Allow-Origin") == (allowed if allowed == "*" else None)

    run(main())


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (MemoryError(), 503, "out of memory"),
        (RuntimeError("can't start new thread"), 503, "threads"),
        (OSError(errno.EMFILE, "x"), 503, "RLIMIT_NOFILE"),
        (OSError(errno.ENOSPC, "x"), 503, "disk"),
        (OSError("x"), 500, "internal error"),
        (ValueError("x"), 500, "internal error"),
    ],
)
def test_a_process_that_has_run_out_of_something_says_of_what(error, status, says):
    """A router tries another engine then, and a client comes again."""

    async def main():
        async def handler(request):
            raise error

        server = Server(handler)
        async with aiohttp.ClientSession() as session, session.get(await server.url()) as answer:
            assert answer.status == status and ("Retry-After" in answer.headers) == (status == 503)
            assert says in (await answer.json())["error"]["message"]
        server.stop.set()
        await server.task

    run(main())


def test_no_thread_is_made_for_work_beside_the_event_loop():
    """Making one may never end where memory is short, and the event loop waits for it."""

    async def main():
        async def handler(request):
            return PlainTextResponse(await asyncio.to_thread(lambda: threading.current_thread().name))

        server = Server(handler)
        url = await server.url()
        before = set(threading.enumerate())  # pools of other tests stay
        async with aiohttp.ClientSession() as session:
            gets = [session.get(url) for _ in range(40)]
            for answer in await asyncio.gather(*gets):
                assert (await answer.text()).startswith("beside-loop")
        assert set(threading.enumerate()) <= before
        server.stop.set()
        await server.task

    run(main())


def test_one_address_cannot_fill_a_port_of_probes() -> None:
    """A kubelet that is refused, because a scraper holds every connection with requests that run, ends the pod."""

    async def main() -> None:
        held, go = asyncio.Event(), asyncio.Event()
        app = make_app("test", bodies=())

        async def hold() -> str:
            held.set()
            await go.wait()
            return "held"

        async def health() -> str:
            return "ok"

        app.add_api_route("/metrics", hold)
        app.add_api_route("/health", health)
        async with beside(app, host="127.0.0.1", port=0) as port, AsyncExitStack() as opened:
            for _ in range(300):
                _, scraper = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
                opened.callback(scraper.close)
                scraper.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            await held.wait()
            reader, kubelet = await asyncio.open_connection("127.0.0.1", port)
            opened.callback(kubelet.close)
            kubelet.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 OK" in await reader.readline()
            go.set()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_the_thread_that_parses_large_calls_is_there_from_the_start() -> None:
    """One that is made when memory is short may end before it has begun, and the event loop would wait for it."""
    serving_app._parser.cache_clear()
    before = set(threading.enumerate())  # pools of other tests stay
    make_app("test", bodies=())
    assert [thread.name for thread in set(threading.enumerate()) - before] == ["calls_0"]
