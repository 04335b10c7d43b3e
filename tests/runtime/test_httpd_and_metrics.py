"""The shared server parts: error bodies, drain, port conflicts; and the names and views of metrics."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram

from isthmus_runtime.errors import ConfigError, Overloaded, TransferFailed
from isthmus_runtime.httpd import InFlight, error_middleware, run_app
from isthmus_runtime.metrics import EngineMetrics, RequestMetrics, RouterMetrics, TransferMetrics, render
from isthmus_runtime.tallies import Spread, Tallies


def run(work):
    return asyncio.run(asyncio.wait_for(work, 30))


class Server:
    """`run_app` in a task, over one handler."""

    def __init__(self, handler, **settings) -> None:
        self.in_flight = InFlight()
        self.stop = asyncio.Event()
        self.draining = asyncio.Event()
        self.port = asyncio.get_running_loop().create_future()
        app = web.Application(middlewares=[error_middleware])
        app.router.add_get("/", handler)

        async def probe(request):
            return web.Response(text="alive")

        app.router.add_get("/health", probe)
        settings = {"host": "127.0.0.1", "port": 0, "drain_timeout_s": 20.0, **settings}
        self.task = asyncio.create_task(
            run_app(
                app,
                in_flight=self.in_flight,
                stop=self.stop,
                on_started=self.port.set_result,
                on_drain=self.draining.set,
                **settings,
            )
        )

    async def url(self, path="/"):
        return f"http://127.0.0.1:{await self.port}{path}"


def test_bad_http_of_a_client_is_one_line_in_the_log(caplog):
    async def handler(request):
        return web.Response(text=(await request.read()).decode())

    async def main():
        server = Server(handler)
        url = await server.url()
        reader, writer = await asyncio.open_connection("127.0.0.1", await server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"400"
        writer.close()
        async with (
            aiohttp.ClientSession() as session,
            session.get(url, data=b"no gzip at all", headers={"Content-Encoding": "gzip"}) as answer,
        ):
            assert answer.status == 400
            assert "cannot be read" in (await answer.json())["error"]["message"]
        server.stop.set()
        await server.task

    with caplog.at_level("INFO"):
        run(main())
    bad = [r for r in caplog.records if "a client sent bad HTTP" in r.getMessage()]
    assert bad and not any(r.exc_info for r in caplog.records)


async def get(url):
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, dict(answer.headers), await answer.text()


def test_errors_of_handlers():
    async def main():
        async def handler(request):
            raise {"ours": TransferFailed("lost", stage="SENDING"), "busy": Overloaded("full", retry_after_s=0.2)}.get(
                request.query["what"], KeyError("secret")
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
        async def handler(request):
            response = web.StreamResponse()
            await response.prepare(request)
            if written:
                await response.write(written)
            raise TransferFailed("lost")

        server = Server(handler)
        with pytest.raises(aiohttp.ClientError):
            await get(await server.url())
        server.stop.set()
        await server.task

    run(main())


def test_drain_lets_work_end_and_answers_probes():
    async def main():
        began, go, drained = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def handler(request):
            with server.in_flight.track():
                began.set()
                await go.wait()
                return web.Response(text="done")

        server = Server(handler, drained=drained.wait)
        work = asyncio.create_task(get(await server.url()))
        await began.wait()
        server.stop.set()
        await server.draining.wait()
        assert (await get(await server.url("/health")))[2] == "alive"
        status, _, body = await get(await server.url())
        assert status == 503 and "shutting down" in body
        go.set()
        assert (await work)[2] == "done"
        assert (await get(await server.url("/health")))[2] == "alive"  # `drained` has not returned yet
        drained.set()
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


def test_port_in_use_names_port_and_flag():
    async def main():
        async def handler(request):
            return web.Response()

        first = Server(handler)
        port = await first.port
        with pytest.raises(ConfigError, match=f"--port {port} on 127.0.0.1 is already in use"):
            await Server(handler, port=port).task
        first.stop.set()
        await first.task

    run(main())


PROGRAM = """
import asyncio
from aiohttp import web
from isthmus_runtime.httpd import InFlight, run_app
busy = InFlight()
async def main():
    async def stuck():
        with busy.track():
            await asyncio.Event().wait()
    task = asyncio.ensure_future(stuck())
    await asyncio.sleep(0)
    await run_app(web.Application(), host="127.0.0.1", port=0, drain_timeout_s=60, in_flight=busy,
                  on_started=lambda p: print("up", flush=True), on_drain=lambda: print("draining", flush=True))
    print("ended", flush=True)
    await asyncio.gather(task, return_exceptions=True)
asyncio.run(main())
"""


def test_signals():
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        os.kill(process.pid, signal.SIGTERM)
        assert process.stdout.readline() == "draining\n"
        os.kill(process.pid, signal.SIGTERM)  # the second one does not wait
        assert process.stdout.readline() == "ended\n"
        assert process.wait(20) == 0


def test_vllm_names_are_views_of_ours():
    registry = CollectorRegistry()
    engine = EngineMetrics(registry, "m")
    requests = RequestMetrics(registry, "m")
    TransferMetrics(registry, "m").failed("SENDING")
    engine.set_cache_config(block_size="16", num_gpu_blocks="10")
    engine.running.set(3)
    engine.kv_usage.set(0.5)
    engine.prefix_hits.inc(7)
    requests.time_to_first_token.observe(0.02)
    requests.succeeded("stop", 1.0)
    requests.failed(499, "cancelled")
    text = render(registry).decode()
    for line in (
        'vllm:num_requests_running{model_name="m"} 3.0',
        'isthmus_num_requests_running{model_name="m"} 3.0',
        'vllm:kv_cache_usage_perc{model_name="m"} 0.5',
        'vllm:prefix_cache_hits_total{model_name="m"} 7.0',
        'vllm:time_to_first_token_seconds_count{model_name="m"} 1.0',
        'vllm:time_to_first_token_seconds_bucket{le="0.02",model_name="m"} 1.0',
        'vllm:request_success_total{finished_reason="stop",model_name="m"} 1.0',
        'vllm:cache_config_info{block_size="16",model_name="m",num_gpu_blocks="10"} 1.0',
        'isthmus_request_failures_total{code="cancelled",model_name="m",status="499"} 1.0',
        'isthmus_xfer_failures_total{model_name="m",stage="SENDING"} 1.0',
        "# TYPE vllm:time_to_first_token_seconds histogram",
        "# TYPE vllm:num_preemptions_total counter",
        "# TYPE vllm:inter_token_latency_seconds histogram",
        "# TYPE vllm:e2e_request_latency_seconds histogram",
        "# TYPE vllm:num_requests_waiting gauge",
        "# TYPE vllm:prefix_cache_queries_total counter",
    ):
        assert line in text, line


def test_tallies_export_what_prometheus_client_does():
    theirs, ours, values = CollectorRegistry(), CollectorRegistry(), [0, 0.005, 0.0051, 1, 2.5, 7, 1e9]
    histogram = Histogram("h", "Text.", ("model_name",), registry=theirs, buckets=(0.005, 1, 2.5)).labels("m")
    counter = Counter("c", "More.", ("model_name", "why"), registry=theirs)
    spread, tallies = Spread("h", "Text.", (0.005, 1, 2.5), "m"), Tallies("c", "More.", ("model_name", "why"))
    ours.register(spread)
    ours.register(tallies)
    for value in values:
        histogram.observe(value)
        spread.observe(value)
        counter.labels("m", f"{value > 1}").inc(value)
        tallies.labels("m", f"{value > 1}").inc(value)
    lines = render(theirs).decode().splitlines()
    assert render(ours).decode().splitlines() == [line for line in lines if "_created" not in line]


def test_routers_export_no_engine_names():
    registry = CollectorRegistry()
    RouterMetrics(registry, "m")
    RequestMetrics(registry, "m", prefix="isthmus_router_", vllm_names=False)
    names = {line.split()[2] for line in render(registry).decode().splitlines() if line.startswith("# TYPE")}
    assert names and all(name.startswith("isthmus_router_") for name in names)
