"""The engine's HTTP surface over real sockets: streams, cancellation by disconnect, probes, drain, metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace

import aiohttp
import pytest
from engine_stack import engine, engine_apart
from engine_world import request
from executors import Breaking, Gated
from prometheus_client import CollectorRegistry
from serving import looking
from serving import served as serving

from isthmus_runtime.engine.backend import EngineBackend
from isthmus_runtime.engine.long_lived import LongLived
from isthmus_runtime.engine.meters import EngineMeters
from isthmus_runtime.engine.server import BODIES, EngineServer
from isthmus_runtime.executor.fake import FakeExecutor, expected_tokens
from isthmus_runtime.protocol.calls import AbortCall, GenerateCall, PrefillAnswer, PrefillCall, TicketCall
from isthmus_runtime.protocol.info import EngineInfo, KvInfo, TransferInfo
from isthmus_runtime.protocol.lines import parse_line, parse_prefill_line, reserved_line, sent_line
from isthmus_runtime.protocol.request import WireRequest
from isthmus_runtime.protocol.ticket import Ticket
from isthmus_runtime.request import FinishReason, Structure, TokenChunk
from isthmus_runtime.serving.app import add_pages, make_app
from isthmus_runtime.serving.in_flight import InFlight

DEADLINE_S = 20


@pytest.fixture(autouse=True, params=["one process", "two processes"])
def apart(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test of this module holds for an engine here and for one behind a channel."""
    monkeypatch.setitem(globals(), "APART", request.param == "two processes")


APART = False


@asynccontextmanager
async def served(
    executor: FakeExecutor | None = None, no_progress_timeout_s: float = 30.0, threads: LongLived | None = None
) -> AsyncIterator[tuple[aiohttp.ClientSession, EngineBackend, InFlight]]:
    async with AsyncExitStack() as stack:
        if APART:
            backend = await stack.enter_async_context(engine_apart(executor=executor, threads=threads))
        else:
            backend = stack.enter_context(engine(executor=executor, threads=threads))
        in_flight = InFlight()
        kv = KvInfo(
            block_size=4, physical_blocks=65, usable_blocks=64, bytes_per_block=32, max_model_len=128, layout_digest="d"
        )

        def info() -> EngineInfo:
            return EngineInfo(
                role="unified",
                model="fake",
                served_names=("fake",),
                fingerprint="f",
                kv=kv,
                transfer=TransferInfo(epoch="e1"),
                version="0",
                draining=in_flight.draining,
            )

        server = EngineServer(
            backend,
            info,
            EngineMeters(CollectorRegistry(), "fake"),
            in_flight,
            no_progress_timeout_s=no_progress_timeout_s,
            clock=time.monotonic,
        )
        app = make_app("test", bodies=BODIES)
        server.add_probes(app)
        server.add_internal(app)
        server.add_metrics(app)
        add_pages(app)
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        async with (
            serving(app, in_flight=in_flight) as port,
            aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout) as session,
        ):
            yield session, backend, in_flight


async def got(request: object) -> tuple[int, str]:
    """Status and body of an answer."""
    async with request as answer:  # type: ignore[attr-defined]
        return answer.status, await answer.text()


async def becomes(session: aiohttp.ClientSession, path: str, status: int) -> str:
    """The body of the first answer with `status`: an engine in its own process tells how it is from time to time."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found, text = await got(session.get(path))
            if found == status:
                return text


def call(rid: str, prompt: list[int], count: int) -> str:
    return GenerateCall(request=WireRequest.of(request(rid, prompt, count))).model_dump_json()


async def idle(backend: EngineBackend) -> None:
    """Returns when the engine has no work; the caller's deadline bounds it."""
    busy = True
    while busy:
        busy = bool(await asyncio.to_thread(backend.engine.loop.call, lambda: backend.engine.loop.scheduler.has_work))


def test_stream_of_a_local_request() -> None:
    async def main() -> None:
        async with served() as (session, _, _):
            async with session.post("/internal/generate", data=call("a", [1, 2, 3], 6)) as response:
                assert response.status == 200
                chunks = [parse_line(line) async for line in response.content]
            assert all(isinstance(c, TokenChunk) for c in chunks)
            tokens = [t for c in chunks if isinstance(c, TokenChunk) for t in c.token_ids]
            assert tokens == expected_tokens([1, 2, 3], request("x", [1], 1).sampling, 6)
            last = chunks[-1]
            assert isinstance(last, TokenChunk) and last.finish_reason is FinishReason.LENGTH

    asyncio.run(main())


def test_closing_the_connection_frees_the_request() -> None:
    async def main() -> None:
        async with served() as (session, backend, _):
            response = await session.post("/internal/generate", data=call("a", [1, 2, 3], 120))
            await response.content.readline()
            response.close()
            await asyncio.wait_for(idle(backend), DEADLINE_S)
            await asyncio.to_thread(backend.engine.loop.call, backend.engine.loop.scheduler.check)

    asyncio.run(main())


@pytest.mark.parametrize("leaves", [False, True])
def test_a_peer_that_only_closes_its_side_is_answered(leaves: bool) -> None:
    """On the wire: the whole stream, or, where nobody reads it, an end of the request."""

    async def main() -> None:
        gated = Gated()
        async with served(gated) as (session, backend, _):

            async def live(count: int) -> None:
                scheduler = backend.engine.loop.scheduler
                while await asyncio.to_thread(backend.engine.loop.call, lambda: len(list(scheduler.live()))) != count:
                    pass

            body = call("a", [1, 2, 3], 6).encode()
            url = session._base_url
            assert url is not None
            reader, writer = await asyncio.open_connection(url.host, url.port)
            head = b"POST /internal/generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
            writer.write(head + body)
            await asyncio.wait_for(live(1), DEADLINE_S)
            if leaves:
                writer.close()
                await asyncio.wait_for(live(0), DEADLINE_S)
                gated.gate.set()
                return
            with looking() as looked:
                writer.write_eof()
                await asyncio.wait_for(looked.wait(), DEADLINE_S)
            gated.gate.set()
            answer = await asyncio.wait_for(reader.read(), DEADLINE_S)
            writer.close()
            assert b"HTTP/1.1 200 OK" in answer and answer.endswith(b"\r\n0\r\n\r\n")
            lines = [line for line in answer.split(b"\r\n") if line.startswith(b"{")]
            tokens = [t for line in lines for t in parse_line(line).token_ids]  # type: ignore[union-attr]
            assert tokens == expected_tokens([1, 2, 3], request("x", [1], 1).sampling, 6)

    asyncio.run(main())


def loud(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said above debug, or with a traceback, but for the server's start and end."""
    ours = [r for r in caplog.records if r.name != "uvicorn.error" and not r.name.endswith("serving.server")]
    return [r.getMessage() for r in ours if r.levelno > logging.DEBUG or r.exc_info]


def test_readers_that_leave_at_any_moment_are_no_event(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "isthmus_runtime.engine.server")
    rng = random.Random(5)

    async def leave(session: aiohttp.ClientSession, number: int) -> None:
        reader, writer = await asyncio.open_connection(session._base_url.host, session._base_url.port)  # type: ignore[union-attr]
        body = call(f"r{number}", [1, 2, 3], rng.choice((1, 3, 120))).encode()
        head = f"POST /internal/generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        sent = rng.choice((0, len(body) // 2, len(body)))
        writer.write((head + body)[: len(head) + sent])
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        if sent == len(body) and rng.random() < 0.3:
            await asyncio.wait_for(reader.readline(), DEADLINE_S)
        if rng.random() < 0.5:
            writer.transport.abort()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async def main() -> None:
        async with served() as (session, backend, _):
            for first in range(0, 200, 20):
                await asyncio.gather(*(leave(session, first + i) for i in range(20)))
            await asyncio.wait_for(idle(backend), DEADLINE_S)
            await asyncio.to_thread(backend.engine.loop.call, backend.engine.loop.scheduler.check)

    asyncio.run(main())
    assert not loud(caplog)


def test_a_reader_that_leaves_is_one_debug_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "isthmus_runtime.engine.server")

    async def main() -> None:
        gated = Gated()
        async with served(gated) as (session, backend, in_flight):
            task = asyncio.create_task(session.post("/internal/generate", data=call("gone", [1, 2, 3], 2)))
            await asyncio.wait_for(asyncio.to_thread(gated.queued.wait), DEADLINE_S)
            task.cancel()
            await asyncio.wait_for(in_flight.wait_idle(), DEADLINE_S)
            gated.gate.set()
            await asyncio.wait_for(idle(backend), DEADLINE_S)

    asyncio.run(main())
    assert [r.getMessage() for r in caplog.records if r.name.startswith("isthmus_runtime.engine.server")] == [
        "the reader of gone has disconnected"
    ]
    assert not loud(caplog)


def test_an_abort_of_an_earlier_attempt_comes_too_late_for_a_local_one() -> None:
    """The router tries again on the same engine while the abort of its first try is still on its way."""

    async def main() -> None:
        gated = Gated()
        async with served(gated) as (session, _, _):
            body = GenerateCall(request=WireRequest.of(request("r", [1, 2, 3], 6)), local_attempt="second")
            task = asyncio.create_task(session.post("/internal/generate", data=body.model_dump_json()))
            await asyncio.wait_for(asyncio.to_thread(gated.queued.wait), DEADLINE_S)
            late = AbortCall(request_id="r", attempt="first").model_dump_json()
            assert (await got(session.post("/internal/abort", data=late)))[0] == 200
            gated.gate.set()
            chunks = [parse_line(line) async for line in (await task).content]
            assert isinstance(chunks[-1], TokenChunk) and chunks[-1].finish_reason is FinishReason.LENGTH

    asyncio.run(main())


def test_a_refusal_while_draining_names_stage_and_attempt() -> None:
    async def main() -> None:
        async with served() as (session, _, in_flight):
            in_flight.start_drain()
            body = GenerateCall(request=WireRequest.of(request("a", [1], 3)), attempt="a-1").model_dump_json()
            async with session.post("/internal/generate", data=body) as response:
                error = (await response.json())["error"]
            assert (response.status, error["stage"], error["attempt"]) == (503, "admission", "a-1")

    asyncio.run(main())


def test_a_prefill_without_an_attempt_is_refused_by_name() -> None:
    """Its answer would go to an id that nobody waits for."""

    async def main() -> None:
        async with served() as (session, _, _):
            ticket = Ticket(mode="memory", attempt="", layout_digest="d")
            body = PrefillCall(request=WireRequest.of(request("a", [1], 3)), attempt="-", ticket=ticket)
            data = body.model_dump_json().replace('"attempt":"-"', '"attempt":""')
            status, text = await got(session.post("/internal/prefill", data=data))
            assert status == 400 and json.loads(text)["error"]["param"] == "attempt"

    asyncio.run(main())


def test_a_prompt_without_its_ticket_is_answered_in_lines() -> None:
    """This engine moves no KV: that is the last line, for the answer has begun."""

    async def main() -> None:
        async with served() as (session, _, _):
            body = PrefillCall(request=WireRequest.of(request("a", [1], 3)), attempt="a-1")
            status, text = await got(session.post("/internal/prefill", data=body.model_dump_json()))
            first, last = map(parse_prefill_line, text.encode().splitlines(keepends=True))
            assert status == 200 and first == TokenChunk()
            assert isinstance(last, TokenChunk) and last.finish_reason is FinishReason.ERROR
            assert last.error is not None and "no KV transfer" in last.error.message
            ticket = TicketCall(ticket=Ticket(mode="memory", attempt="a-1", layout_digest="d"))
            late = await got(session.post("/internal/ticket", data=ticket.model_dump_json()))
            assert late == (200, "{}"), "it comes too late, which is no fault of the router's"

    asyncio.run(main())


@pytest.mark.parametrize("more", [{"structure": Structure("regex", "a")}, {"prompt_logprobs": 0}])
def test_what_comes_with_more_than_a_token_needs_its_ticket(more: dict[str, object]) -> None:
    async def main() -> None:
        async with served() as (session, _, _):
            wanted = request("a", [1], 3)
            if "structure" in more:
                wanted = replace(wanted, **more)
            else:
                wanted = replace(wanted, sampling=replace(wanted.sampling, **more))
            body = PrefillCall(request=WireRequest.of(wanted), attempt="a-1").model_dump_json()
            status, text = await got(session.post("/internal/prefill", data=body))
            assert status == 400 and json.loads(text)["error"]["param"] == "ticket"

    asyncio.run(main())


def test_prefill_lines_are_read_as_they_were_written() -> None:
    answer = PrefillAnswer(attempt="a", num_tokens=3, cached_tokens=2, sent_bytes=7, transfer_s=0.5)
    assert parse_prefill_line(sent_line(answer)) == answer
    ticket = Ticket(mode="memory", attempt="a", layout_digest="d")
    for line in (b"", b"{", b'{"sent":1}\n', b'{"sent":{}}\n', reserved_line(ticket)):
        with pytest.raises((ValueError, KeyError)):
            parse_prefill_line(line)


def test_a_prefill_that_a_drain_ends_is_refused_and_not_cut_off() -> None:
    """The router is still there: it hears that it may try elsewhere, and what for."""

    async def main() -> None:
        gated = Gated()
        async with served(gated) as (session, backend, in_flight):
            ticket = Ticket(mode="memory", attempt="a-1", layout_digest="d")
            body = PrefillCall(request=WireRequest.of(request("a", [1], 3)), attempt="a-1", ticket=ticket)
            waits = asyncio.Event()

            async def endless(call: PrefillCall, client: str = "") -> PrefillAnswer:
                waits.set()
                await asyncio.Event().wait()
                raise AssertionError

            backend.prefill = endless  # type: ignore[method-assign]
            task = asyncio.create_task(got(session.post("/internal/prefill", data=body.model_dump_json())))
            await asyncio.wait_for(waits.wait(), DEADLINE_S)
            in_flight.start_drain()
            in_flight.abort()
            status, text = await task
            error = json.loads(text)["error"]
            assert (status, error["stage"], error["attempt"]) == (503, "draining", "a-1")

    asyncio.run(main())


@pytest.mark.parametrize("name", ["transfer-greeter", "rank-1", "channel-in"])
def test_a_thread_that_has_ended_makes_the_process_unhealthy(name: str) -> None:
    go = threading.Event()
    greeter = threading.Thread(target=go.wait, name=name, daemon=True)
    greeter.start()
    threads = LongLived()

    async def main() -> None:
        async with served(threads=threads) as (session, _, _):
            assert (await got(session.get("/health")))[0] == 200
            go.set()
            await asyncio.to_thread(greeter.join, DEADLINE_S)
            for path in ("/health", "/ready"):
                assert f"{name} has ended" in await becomes(session, path, 503)

    asyncio.run(main())


def test_the_end_of_the_thread_of_masks_makes_the_process_unhealthy() -> None:
    async def main() -> None:
        with engine() as backend:
            threads = LongLived()
            backend.engine.loop._masks.stop(DEADLINE_S)
            assert backend.engine.loop.call(lambda: True), "the engine itself goes on"
            assert "masks has ended" in threads.problem()

    asyncio.run(main())


def test_refusals_are_plain_http_errors_that_name_the_field() -> None:
    async def main() -> None:
        async with served() as (session, _, _):
            for body, status, word in (
                (call("a", [1] * 500, 1), 400, "at most 127"),
                (call("a", [1, 1 << 40], 1), 400, "token id 1099511627776"),
                (call("a", [-1], 1), 400, "token id -1"),
                ("{", 400, "body"),
                ('{"request": {"request_id": "a", "sampling": {"max_tokens": 1}}}', 400, "give prompt_token_ids"),
                ('{"surprise": 1, "request": null}', 400, ""),
            ):
                async with session.post("/internal/generate", data=body) as response:
                    text = await response.text()
                    assert response.status == status, text
                    assert word in text
            async with session.get("/internal/drained") as response:
                assert response.status == 400
            async with session.post("/internal/abort", data='{"request_id": "nobody"}') as response:
                assert response.status == 200

    asyncio.run(main())


def test_probes_follow_the_engine() -> None:
    async def main() -> None:
        gated = Gated()
        async with served(gated, no_progress_timeout_s=0.0) as (session, _, in_flight):
            assert (await got(session.get("/health")))[0] == 200
            assert (await got(session.get("/ready")))[0] == 200
            task = asyncio.create_task(session.post("/internal/generate", data=call("a", [1], 3)))
            await asyncio.wait_for(asyncio.to_thread(gated.queued.wait), DEADLINE_S)
            assert "no step has finished" in await becomes(session, "/health", 503)
            gated.gate.set()
            await (await task).read()
            await becomes(session, "/health", 200)
            in_flight.start_drain()
            assert (await got(session.get("/ready")))[0] == 503
            async with session.post("/internal/generate", data=call("b", [1], 3)) as refused:
                assert refused.status == 503
                assert "Retry-After" in refused.headers

    asyncio.run(main())


def test_a_broken_engine_is_unhealthy_and_says_why() -> None:
    async def main() -> None:
        async with served(Breaking(65, 4)) as (session, _, _):
            async with session.post("/internal/generate", data=call("a", [1], 50)) as response:
                last = [parse_line(line) async for line in response.content][-1]
                assert isinstance(last, TokenChunk) and last.error is not None
                assert "device lost" in last.error.message
            assert "device lost" in await becomes(session, "/health", 503)

    asyncio.run(main())


def test_metrics_have_the_names_that_dashboards_use() -> None:
    async def main() -> None:
        async with served() as (session, _, _):
            await (await session.post("/internal/generate", data=call("a", [1, 2, 3], 6))).read()
            text = await (await session.get("/metrics")).text()
            for name in (
                "vllm:num_requests_running",
                "vllm:num_requests_waiting",
                "vllm:kv_cache_usage_perc",
                "vllm:time_to_first_token_seconds_count",
                "isthmus_quarantined_blocks",
                "isthmus_generation_tokens_total",
            ):
                assert name in text, name
            assert 'vllm:request_success_total{finished_reason="length",model_name="fake"} 1.0' in text

    asyncio.run(main())
