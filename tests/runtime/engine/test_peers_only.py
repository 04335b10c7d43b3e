"""Internal routes over real sockets: strangers are refused by the head of their request, peers are served."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest
from engine_stack import engine
from engine_world import request
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from serving import served
from tokens import Issuer, write

from isthmus_runtime.credentials import Credentials
from isthmus_runtime.engine.kv_events import KvEventFeed
from isthmus_runtime.engine.meters import EngineMeters
from isthmus_runtime.engine.server import BODIES, EngineServer
from isthmus_runtime.protocol.calls import AdapterCall, CommitCall, GenerateCall, PrefillCall
from isthmus_runtime.protocol.info import EngineInfo, KvInfo, TransferInfo
from isthmus_runtime.protocol.request import WireRequest
from isthmus_runtime.router.kv_events import follow
from isthmus_runtime.router.links import Links
from isthmus_runtime.router.prefixes import StoredBlocks
from isthmus_runtime.serving.access import INTERNAL, OF_RUNNING
from isthmus_runtime.serving.app import add_pages, make_app
from isthmus_runtime.serving.in_flight import InFlight
from isthmus_runtime.transfer.drain import ask_peer

DEADLINE_S = 20
CLUSTER, STRANGER = Issuer(), Issuer()
Role = Literal["prefill", "decode", "unified"]
ROUTES = [
    ("POST", "/internal/generate"),
    ("POST", "/internal/prefill"),
    ("POST", "/internal/ticket"),
    ("POST", "/internal/commit"),
    ("POST", "/internal/abort"),
    ("POST", "/internal/adapter"),
    ("GET", "/internal/drained?attempt=a"),
    ("GET", "/internal/kv-events"),
    ("GET", "/internal/generate"),
    ("POST", "/internal/no-such-route"),
]


class Told(StoredBlocks):
    """Notes that events have come."""

    def __init__(self, told: asyncio.Event) -> None:
        super().__init__()
        self._told = told

    def apply(self, *args: Any, **event: Any) -> None:
        super().apply(*args, **event)
        self._told.set()


@asynccontextmanager
async def server(
    folder: Path, role: Role, in_flight: InFlight | None = None, made: Callable[[FastAPI], object] = bool
) -> AsyncIterator[int]:
    """`made` gets the application."""
    with engine() as backend:
        kv = KvInfo(
            block_size=4, physical_blocks=65, usable_blocks=64, bytes_per_block=32, max_model_len=128, layout_digest="d"
        )
        credentials = Credentials(str(folder))
        feed = KvEventFeed(asyncio.get_running_loop())
        app = make_app("test", bodies=BODIES, credentials=credentials)
        metered = EngineServer(
            backend,
            lambda: EngineInfo(
                role=role,
                model="fake",
                served_names=("fake",),
                fingerprint="f",
                kv=kv,
                transfer=TransferInfo(epoch="e1"),
                version="0",
            ),
            EngineMeters(CollectorRegistry(), "fake"),
            InFlight() if in_flight is None else in_flight,
            no_progress_timeout_s=30.0,
            clock=time.monotonic,
            kv_events=feed,
            credentials=credentials,
        )
        metered.add_probes(app)
        metered.add_internal(app)
        metered.add_metrics(app)
        add_pages(app)
        made(app)
        async with served(app) as port:
            try:
                yield port
            finally:
                feed.close()


def client(port: int) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=aiohttp.ClientTimeout(total=DEADLINE_S))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "peers", token=CLUSTER.token(), trust=CLUSTER.trust())
    return tmp_path / "peers"


@pytest.mark.parametrize("role", ["prefill", "decode", "unified"])
def test_no_internal_route_serves_a_stranger(folder: Path, role: Role) -> None:
    shown = {
        "nothing": (None, 401),
        "a key of another cluster": (f"Bearer {STRANGER.token()}", 401),
        "a token of another service": (f"Bearer {CLUSTER.token(aud=['serving.isthmus.dev/team/other'])}", 403),
    }

    async def main() -> None:
        async with server(folder, role) as port, client(port) as s:
            for method, path in ROUTES:
                for who, (header, status) in shown.items():
                    headers = {"Authorization": header} if header else {}
                    async with s.request(method, path, headers=headers) as answer:
                        assert answer.status == status, (method, path, who)
                        error = (await answer.json())["error"]
                        assert error["code"] == ("unauthenticated" if status == 401 else "access_denied")
                        assert answer.headers.get("WWW-Authenticate") == ("Bearer" if status == 401 else None)
            for path in ("/health", "/ready", "/info", "/metrics"):
                async with s.get(path) as answer:
                    assert answer.status == 200, path

    asyncio.run(main())


def test_every_internal_route_is_new_work_or_known_to_be_of_what_runs(folder: Path) -> None:
    """While memory is short or the engine drains new work is refused, and what lets requests end is heard."""
    reads = {"/internal/kv-events"}
    """Takes up a reader, and no work."""

    async def main() -> None:
        in_flight, apps = InFlight(), list[FastAPI]()
        async with server(folder, "unified", in_flight, apps.append) as port, client(port) as s:
            routes = {path for route in apps[0].routes if (path := getattr(route, "path", "")).startswith(INTERNAL)}
            running = {path.decode() for path in OF_RUNNING}
            assert running < routes and len(routes) >= 8
            in_flight.start_drain()
            headers = {"Authorization": f"Bearer {CLUSTER.token()}"}
            wanted = WireRequest.of(request("r1", [1, 2, 3], 2))
            bodies = {
                "/internal/generate": GenerateCall(request=wanted),
                "/internal/prefill": PrefillCall(request=wanted, attempt="a"),
                "/internal/adapter": AdapterCall(name="one"),
            }
            for path in sorted(routes - running - reads):
                async with s.post(
                    path, data=bodies[path].model_dump_json(exclude_none=True), headers=headers
                ) as answer:
                    assert (answer.status, (await answer.json())["error"]["code"]) == (503, "overloaded"), (
                        path,
                        await answer.text(),
                    )

    asyncio.run(main())


def test_a_stranger_is_refused_before_the_body_is_there(folder: Path) -> None:
    async def main() -> bytes:
        async with server(folder, "decode") as port, asyncio.timeout(DEADLINE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /internal/generate HTTP/1.1\r\nHost: x\r\nContent-Length: 60000000\r\n\r\n{")
            line = await reader.readline()
            writer.close()
            return line

    assert b" 401 " in asyncio.run(main())


def test_the_router_s_calls_show_its_credential(folder: Path, tmp_path: Path) -> None:
    """By each of its clients: `Links`, the follower of KV events, and decode's question about a drain."""
    mine, other = Credentials(str(folder)), tmp_path / "other"
    write(other, token=STRANGER.token(), trust=STRANGER.trust())
    call = GenerateCall(request=WireRequest.of(request("r1", [1, 2, 3], 2))).model_dump_json().encode()
    commit = CommitCall(request_id="r9", attempt="a9", ok=True)

    async def statuses(port: int, credentials: Credentials | None) -> tuple[int, int]:
        links = Links(credentials)
        try:
            exchange = await links.open(f"http://127.0.0.1:{port}", "/internal/generate", (call,))
            body = await exchange.read()
            status = exchange.status
            exchange.release()
            assert status == 200 or json.loads(body)["error"]["code"] == "unauthenticated"
            try:
                await links.commit(f"http://127.0.0.1:{port}", commit)
            except Exception as error:
                return status, getattr(error, "status", 0)
            return status, 200
        finally:
            await links.close()

    async def main() -> None:
        async with server(folder, "decode") as port, asyncio.timeout(DEADLINE_S):
            assert await statuses(port, mine) == (200, 200)
            for credentials in (None, Credentials(str(other))):
                status, committed = await statuses(port, credentials)
                assert status == 401 and committed != 200
            url = f"http://127.0.0.1:{port}"
            assert await asyncio.to_thread(ask_peer, url, "e1", "a1", mine)
            assert not await asyncio.to_thread(ask_peer, url, "e1", "a1")
            async with aiohttp.ClientSession() as session:
                told = asyncio.Event()
                reading = asyncio.create_task(follow(session, url, Told(told), mine))
                await told.wait()
                reading.cancel()
                refused = asyncio.Event()
                assert await follow(session, url, Told(refused)) and not refused.is_set()

    asyncio.run(main())


def test_an_engine_without_a_usable_token_is_not_ready(folder: Path) -> None:
    write(folder, token=CLUSTER.token(exp=int(time.time()) - 3600))

    async def main() -> None:
        async with server(folder, "decode") as port, client(port) as session, session.get("/ready") as answer:
            assert answer.status == 503
            assert "its own credential" in (await answer.json())["reason"]

    asyncio.run(main())


@pytest.mark.parametrize(
    "url",
    [
        "http://metadata.google.internal:80",
        "http://169.254.169.254:80/latest",
        "http://user@10.0.0.1:80",
        "https://10.0.0.1:8001",
        "http://10.0.0.1",
        "file:///etc/passwd",
        "10.0.0.1:8001",
    ],
)
def test_a_peer_s_address_is_an_address_and_a_port(folder: Path, url: str) -> None:
    """What even a peer may not make decode call."""
    body = json.loads(GenerateCall(request=WireRequest.of(request("r1", [1, 2, 3], 2)), attempt="a").model_dump_json())
    headers = {"Authorization": f"Bearer {CLUSTER.token()}"}

    async def main() -> None:
        async with server(folder, "decode") as port, aiohttp.ClientSession(headers=headers) as session:
            call = session.post(f"http://127.0.0.1:{port}/internal/generate", json={**body, "prefill_url": url})
            async with call as answer:
                assert answer.status == 400
                assert (await answer.json())["error"]["param"] == "prefill_url"

    asyncio.run(main())
