"""What a pod of a tenant may answer: real servers that send without end, packed, elsewhere, slowly, or nonsense."""

import asyncio
import gzip
import json
from dataclasses import replace
from typing import Any

import pytest
from ended import Handle, answering

from isthmus_operator.plan.observed import EngineFacts, Facts, Pod, Word
from isthmus_operator.render.names import Component
from isthmus_operator.shell import facts
from isthmus_operator.shell.facts import MOST_BYTES, MOST_METRICS, FactReader

INFO: dict[str, Any] = {
    "fingerprint": "f",
    "model": "m",
    "waiting": 2,
    "kv": {"physical_blocks": 10, "usable_blocks": 9, "bytes_per_block": 100, "max_model_len": 50},
    "transfer": {"mode": "direct", "transport": "tcp", "probed_gbps": 1.0, "ready": True, "reason": ""},
}
HOST = "127.0.0.1"


class Server:
    """Answers every request by `handle`, and counts what it could send."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.requests: list[str] = []
        self.closed = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.requests.append(head.decode())
        try:
            await self.handle(reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()
            self.closed.set()


def answer(body: bytes, *headers: str, status: str = "200 OK") -> Handle:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()

    return handle


def pod(uid: str = "u", component: Component = Component.DECODE, ip: str = HOST) -> Pod:
    return Pod(name="p", component=component, revision="r", created=0, changed=0, ip=ip, uid=uid, ready=True)


def ask(
    handle: Handle,
    monkeypatch: pytest.MonkeyPatch,
    *,
    then: Handle | None = None,
    one: Pod | None = None,
    load: bool = False,
) -> tuple[list[Facts], Server]:
    """What is read of a pod that answers by `handle`, and of one that answers by `then` afterwards."""

    async def main() -> tuple[list[Facts], Server]:
        server = Server(handle)
        async with answering(server.serve, HOST) as port:
            monkeypatch.setattr(facts, "ENGINE_PORT", port)
            monkeypatch.setattr(facts, "ROUTER_PORT", port)
            reader = FactReader()
            found = [await reader.read("ns", [one or pod()], load=load)]
            if then is not None:
                monkeypatch.setattr(facts, "KEPT_S", 0.0)
                server.handle = then
                found.append(await reader.read("ns", [one or pod()], load=False))
            await reader.close()
        return found, server

    return asyncio.run(main())


def test_an_honest_engine_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    info = INFO | {"model_revision": "c0ffee"}
    (found,), server = ask(answer(json.dumps(info).encode()), monkeypatch)
    said = found.engines["p"]
    assert (said.fingerprint, said.usable_blocks, said.model_revision, said.queued) == ("f", 9, "c0ffee", 2.0)
    assert "accept-encoding: identity" in server.requests[0].lower()


@pytest.mark.parametrize(
    ("status", "size", "told"),
    [("200 OK", MOST_METRICS, 0.95), ("200 OK", MOST_METRICS + 1, None), ("503 Busy", 99, None)],
)
def test_metrics_that_are_not_there_are_no_load_of_nothing(
    status: str, size: int, told: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(
        [
            answer(json.dumps(INFO).encode()),
            answer(b"vllm:kv_cache_usage_perc 0.95\n".rjust(size, b"\n"), status=status),
        ]
    )

    async def each(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next(answers)(reader, writer)

    monkeypatch.setattr(facts, "DEADLINE_S", 60.0)
    (found,), server = ask(each, monkeypatch, load=True)
    assert [request.split()[1] for request in server.requests] == ["/info", "/metrics"]
    assert found.engines["p"].kv_usage == told


def test_a_body_without_end_is_read_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = 0

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + b" " * 65536 + b"\r\n")
            await writer.drain()
            sent += 65536

    monkeypatch.setattr(facts, "DEADLINE_S", 60.0)
    (found,), _ = ask(endless, monkeypatch)
    assert found.engines == {}
    # What lies in the buffers of both kernels beside what was read.
    assert sent < 100 * MOST_BYTES


@pytest.mark.parametrize("size", [MOST_BYTES, MOST_BYTES + 1])
def test_the_limit_itself(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps(INFO).encode().ljust(size)
    (found,), _ = ask(answer(body), monkeypatch)
    assert bool(found.engines) == (size == MOST_BYTES)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "x-gzip", "br"])
def test_nothing_is_unpacked(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = gzip.compress(json.dumps(INFO).encode() + b" " * 30_000_000)
    assert len(bomb) < MOST_BYTES
    (found,), _ = ask(answer(bomb, f"Content-Encoding: {encoding}"), monkeypatch)
    assert found.engines == {}


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary", "308 Permanent"])
def test_nothing_is_followed(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = writer.get_extra_info("sockname")[:2]
        asked.append("once")
        await answer(b"", f"Location: http://{host}:{port}/elsewhere", status=status)(reader, writer)

    (found,), server = ask(redirect, monkeypatch)
    assert found.engines == {}
    assert len(server.requests) == 1 and "/info" in server.requests[0]


def test_a_drip_ends_with_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n")
        while not reader.at_eof():
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.01)

    monkeypatch.setattr(facts, "DEADLINE_S", 0.3)
    (found,), server = ask(drip, monkeypatch)
    assert found.engines == {}
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(1000)) + b"\r\n{}",
        b"HTTP/1.1 200 " + b"x" * 100_000 + b"\r\n\r\n{}",
        b"x" * 100_000,
        b"\x00\x01\x02\r\n\r\n",
    ],
    ids=["long", "many", "status", "none", "binary"],
)
def test_heads_are_bounded(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        await writer.drain()
        await reader.read()

    (found,), _ = ask(handle, monkeypatch)
    assert found.engines == {}


NONSENSE: list[bytes] = [
    b"[" * 60_000,
    b'{"a":' * 9_000,
    b"9" * 60_000,
    b"null",
    b"[]",
    b"\xff\xfe",
    *(
        json.dumps({**INFO, part: {**INFO[part], field: value}}).encode()
        for part, field in (("kv", "usable_blocks"), ("transfer", "probed_gbps"))
        for value in (1e308, -1, 2.0**60, float("inf"), float("nan"), "x", None, [], {})
    ),
    json.dumps(INFO | {"waiting": float("inf")}).encode(),
    json.dumps(INFO | {"kv": 5}).encode(),
    *(
        json.dumps(INFO | {"adapter_list": told}).encode()
        for told in (
            5,
            "x",
            [1],
            {"digest": "d"},
            {"digest": "d", "problems": 5},
            {"digest": "d", "problems": {"a": 1}},
        )
    ),
    *(
        json.dumps(INFO | {"adapter_list": {"digest": "d", "problems": [told]}}).encode()
        for told in (5, "x", None, [], {"name": "x"})
    ),
    json.dumps(INFO | {"transfer": None}).encode(),
    # As deep as JSON is read: deeper than it could be written.
    json.dumps(INFO).replace('"f"', "[" * 700 + "]" * 700, 1).encode(),
    b'[{"url": ' + b"[" * 700 + b"]" * 700 + b"}]",
]


@pytest.mark.parametrize("body", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_is_no_answer(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,), _ = ask(answer(body), monkeypatch)
    assert found.engines == {}
    (found,), _ = ask(answer(b'{"engines": ' + body + b"}"), monkeypatch, one=pod(component=Component.ROUTER))
    assert not any(found.routers.values())


def test_texts_are_cut_before_they_reach_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    info = INFO | {"fingerprint": "f" * 5000, "transfer": INFO["transfer"] | {"reason": "line\n" * 100}}
    (found,), _ = ask(answer(json.dumps(info).encode()), monkeypatch)
    assert len(found.engines["p"].fingerprint) == facts.MOST_TEXT
    assert "\n" not in found.engines["p"].transfer_reason


def test_texts_are_stored_as_they_are_and_move_no_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a surrogate pair is stored as something else: each look would write the status again."""
    info = INFO | {"model": "a\ud800b", "transfer": INFO["transfer"] | {"reason": "\x1b[2Jgone \x00 \u202e"}}
    (found,), _ = ask(answer(json.dumps(info).encode()), monkeypatch)
    assert found.engines["p"].model == "a?b"
    assert found.engines["p"].transfer_reason == "?[2Jgone ? ?"


def test_problems_of_adapters_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [{"name": "n" * 300, "problem": "p\n" * 10}] * 120
    info = INFO | {"adapter_list": {"digest": "d", "listed": 120, "problems": problems}}
    (found,), _ = ask(answer(json.dumps(info).encode()), monkeypatch)
    said = found.engines["p"]
    assert said.adapter_list == "d" and len(said.adapter_problems) == facts.MOST_PROBLEMS
    assert len(said.adapter_problems[0][0]) == facts.MOST_TEXT and "\n" not in said.adapter_problems[0][1]


@pytest.mark.parametrize("address", ["", "169.254.169.254", "fe80::1", "0.0.0.0", "224.0.0.1", "example.com", "1.2.3"])
def test_only_addresses_that_pods_have_are_asked(address: str) -> None:
    async def main() -> None:
        reader = FactReader()
        assert await reader.read("ns", [pod(ip=address)], load=False) == Facts()
        assert reader._session is None
        await reader.close()

    asyncio.run(main())


def test_a_ready_pod_that_falls_silent_keeps_what_it_said_but_not_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    monkeypatch.setattr(facts, "DEADLINE_S", 0.2)
    patient = answer(json.dumps(INFO).encode())
    (first, second), _ = ask(patient, monkeypatch, then=silent)
    said, kept = first.engines["p"], second.engines["p"]
    assert (said.stale, kept.stale) == (False, True)
    assert isinstance(kept, EngineFacts) and kept.fingerprint == said.fingerprint
    monkeypatch.setattr(facts, "SILENT_S", 0.0)
    (_, forgotten), _ = ask(patient, monkeypatch, then=silent)
    assert forgotten.engines == {}


@pytest.mark.slow
def test_pods_of_one_namespace_leave_room_for_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    silent, well, most = "127.0.0.1", "127.0.0.2", 0

    async def main() -> None:
        nonlocal most
        held: list[asyncio.Task[Any] | None] = []
        full, open_now = asyncio.Event(), 0

        async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal most, open_now
            held.append(asyncio.current_task())
            open_now += 1
            most = max(most, open_now)
            if most == facts.MOST_OF_A_NAMESPACE:
                full.set()
            await reader.read()
            open_now -= 1
            writer.close()
            await writer.wait_closed()

        good = Server(answer(json.dumps(INFO).encode())).serve
        async with answering(say_nothing, silent) as port, answering(good, well, port):
            monkeypatch.setattr(facts, "ENGINE_PORT", port)
            monkeypatch.setattr(facts, "DEADLINE_S", 5.0)
            reader = FactReader()

            def asked(service: int) -> asyncio.Task[Facts]:
                pods = [replace(pod(uid=f"{service}-{n}", ip=silent), name=f"p{n}") for n in range(8)]
                return asyncio.create_task(reader.read("theirs", pods, load=False))

            waiting = [asked(service) for service in range(10)]
            async with asyncio.timeout(20):
                await full.wait()
                found = await reader.read("ours", [pod(ip=well)], load=False)
            assert set(found.engines) == {"p"}
            assert most == facts.MOST_OF_A_NAMESPACE
            await asyncio.gather(*waiting)
            await reader.close()
            await asyncio.gather(*(one for one in held if one is not None), return_exceptions=True)

    asyncio.run(main())


def test_one_router_of_each_revision_says_what_it_does_with_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it said stands in for an answer that does not come, and no address that was not asked for is kept."""

    def knows(**said: Any) -> Handle:
        told = [{"url": f"http://{HOST}:8001", "reason": "why", **said}, {"url": "http://10.9.9.9:8001", "reason": ""}]
        return answer(json.dumps({"engines": told}).encode())

    async def main() -> None:
        server = Server(knows(other_tokenizer=True))
        pods = [replace(pod("e"), name="e")] + [
            replace(pod(name, Component.ROUTER), name=name, revision=name[:3]) for name in ("old-1", "old-2", "new-1")
        ]
        async with answering(server.serve, HOST) as port:
            monkeypatch.setattr(facts, "ROUTER_PORT", port)
            reader = FactReader()
            found = await reader.read("ns", pods, load=False)
            assert found.routers == {"old": {HOST: Word.OTHER}, "new": {HOST: Word.OTHER}}
            assert len(server.requests) == 2
            server.handle = answer(b"", status="503 Busy")
            assert await reader.read("ns", pods, load=False) == found
            server.handle = knows()
            later = await reader.read("ns", pods, load=False)
            assert later.routers == {"old": {HOST: Word.NOT_NOW}, "new": {HOST: Word.NOT_NOW}}
            down = [replace(one, ready=one.component is not Component.ROUTER) for one in pods]
            server.handle = answer(b'{"engines": []}')  # it has begun anew, and looked at nothing yet
            long_ago = {uid: (-1e6, words) for uid, (_, words) in reader._words.items()}
            reader._words = dict(long_ago)
            for _ in range(2):
                assert await reader.read("ns", down, load=False) == later, "an only router whose probe has failed"
            reader._words = dict(long_ago)
            server.handle = answer(b"", status="503 Busy")
            await reader.read("ns", pods, load=False)
            assert (await reader.read("ns", pods, load=False)).routers == {}
            server.handle = knows()
            halves = [replace(one, ready=one.name != "old-1") for one in pods]
            assert (await reader.read("ns", halves, load=False)).routers == later.routers
            assert reader._words.keys() == {"old-2", "new-1"}, "a ready one is asked, if there is one"
            server.handle = answer(b"", status="503 Busy")
            monkeypatch.setattr(facts, "SILENT_S", 0.0)
            await reader.read("ns", pods, load=False)
            assert (await reader.read("ns", pods, load=False)).routers == {}
            await reader.close()

    asyncio.run(main())
