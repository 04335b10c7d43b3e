"""Who may connect to the operator, and how many: real sockets of several addresses of loopback."""

import asyncio
import io
import json
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web
from tls_pair import make_pair

from isthmus_operator.api.limits import too_large
from isthmus_operator.commands.parser import build_parser
from isthmus_operator.commands.run_operator import options_of
from isthmus_operator.settings import Identity
from isthmus_operator.shell import door, turns, webhook
from isthmus_operator.shell.door import listening
from isthmus_operator.shell.handlers import webhook_server
from isthmus_operator.shell.operator import OperatorOptions
from isthmus_operator.shell.telemetry import serve_health

WITHIN_S = 60.0
KIND = {"group": "serving.isthmus.dev", "version": "v1alpha1", "resource": "inferenceservices"}
STRANGER, OTHER = "127.0.0.1", "127.0.0.2"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(WITHIN_S):
            await test()

    asyncio.run(main())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair") / "pair"
    make_pair(folder)
    return folder


def trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def test_a_pod_whose_address_is_one_of_ipv6_is_asked_there() -> None:
    """And by those of IPv4 as well, as with any default of the system."""

    async def main() -> None:
        arguments = build_parser().parse_args(["operator", "--namespace-mode=cluster"])
        options = options_of(arguments, Identity(namespace="team", name="pod", kubeconfig="", address="fd00::1"))
        assert options.metrics_host == options.webhook_host == "::"
        async with serve_health("::", 0) as port, aiohttp.ClientSession() as client:
            for host in ("127.0.0.1", "[::1]"):
                async with client.get(f"http://{host}:{port}/healthz") as answer:
                    assert answer.status == 200

    run(main)


class Hall:
    """The operator's webhook and who is connected to it. asked: the reviews that kopf was given."""

    def __init__(self) -> None:
        self.port = 0
        self.asked: list[Any] = []
        self.answer: Callable[..., Coroutine[Any, Any, Any]] = self.allow
        self.writers: list[asyncio.StreamWriter] = []
        self.server: Any = None

    async def allow(self, request: Any, **_: Any) -> Any:
        self.asked.append(request)
        return {"response": {"allowed": True}}

    async def connect(self, host: str, *, tls: bool = True) -> Connection:
        both = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=trusting() if tls else None, local_addr=(host, 0)
        )
        self.writers.append(both[1])
        return both

    async def post(self, host: str, body: bytes, *, sized: bool = False) -> tuple[int, str]:
        connector = aiohttp.TCPConnector(local_addr=(host, 0), ssl=trusting())
        url = f"https://127.0.0.1:{self.port}/validate"
        async with (
            aiohttp.ClientSession(connector=connector) as client,
            client.post(url, data=body if sized else io.BytesIO(body)) as answer,
        ):
            return answer.status, await answer.text()


@asynccontextmanager
async def hall(pair: Path) -> AsyncIterator[Hall]:
    server = webhook_server(OperatorOptions(webhook_port=0, webhook_cert_dir=str(pair)), lambda: None)
    found = Hall()
    found.server = server

    async def answer(request: Any, **head: Any) -> Any:
        return await found.answer(request, **head)

    configs = server(answer)
    found.port = urlsplit((await anext(configs))["url"]).port or 0
    waiting = asyncio.ensure_future(anext(configs))
    try:
        yield found
        assert not waiting.done()
    finally:
        for writer in found.writers:
            writer.transport.abort()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await configs.aclose()  # type: ignore[attr-defined]


def review(**changes: Any) -> bytes:
    request = {"uid": "u", "resource": KIND, "object": {"metadata": {"name": "n"}}, "userInfo": {}}
    return json.dumps({"request": request | changes}).encode()


async def open_ones(readers: list[asyncio.StreamReader]) -> int:
    """How many of the connections the server has not ended, when it has had time to."""
    await asyncio.wait([asyncio.ensure_future(reader.read(1)) for reader in readers], timeout=1.0)
    return sum(not reader.at_eof() and reader.exception() is None for reader in readers)


def test_one_address_cannot_take_all_connections(pair: Path) -> None:
    async def main() -> None:
        async with hall(pair) as there:
            readers = [(await there.connect(STRANGER))[0] for _ in range(3 * door.MOST_OF_ONE)]
            assert (await there.post(OTHER, review()))[0] == 200
            assert (await there.post(STRANGER, review()))[0] == 200
            assert await open_ones(readers) <= door.MOST_OF_ONE

    run(main)


def test_many_addresses_cannot_take_all_connections_either(pair: Path) -> None:
    async def main() -> None:
        async with hall(pair) as there:
            for number in range(door.MOST + 20):
                await there.connect(f"127.0.{1 + number % 6}.1")
            assert (await there.post(OTHER, review()))[0] == 200

    run(main)


def test_who_is_being_answered_does_not_give_way_to_its_own_address(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "BODY_S", 30.0)

    async def main() -> None:
        async with hall(pair) as there:
            body = review()
            reader, writer = await there.connect(STRANGER)
            writer.write(f"POST /validate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode())
            await writer.drain()
            for _ in range(2 * door.MOST_OF_ONE):
                await there.connect(STRANGER)
            writer.write(body)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")

    run(main)


class Shaking:
    """A client that has begun a handshake, by hand: `hello` sends the first word, `end` does the rest."""

    def __init__(self, both: Connection) -> None:
        self.reader, self.writer = both
        self.read, self.write = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = trusting().wrap_bio(self.read, self.write)

    async def hello(self) -> None:
        """Returns when the server has answered it."""
        with pytest.raises(ssl.SSLWantReadError):
            self.tls.do_handshake()
        self.writer.write(self.write.read())
        self.read.write(await self.reader.read(1))

    async def end(self, request: bytes) -> bytes:
        """The first bytes that the server sends after it, or nothing."""
        while True:
            try:
                self.tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                if not (came := await self.reader.read(1 << 16)):
                    return b""
                self.read.write(came)
        self.tls.write(request)
        self.writer.write(self.write.read())
        while True:
            try:
                return self.tls.read(12)
            except ssl.SSLWantReadError:
                if not (came := await self.reader.read(1 << 16)):
                    return b""
                self.read.write(came)


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02"])
def test_a_handshake_that_never_ends_is_ended(pair: Path, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(door, "HANDSHAKE_S", 0.2)

    async def main() -> None:
        async with hall(pair) as there:
            reader, writer = await there.connect(STRANGER, tls=False)
            writer.write(said)
            assert await reader.read(1) == b""

    run(main)


def test_a_handshake_that_takes_its_time_does_not_give_way_to_who_waits(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the API server's took more than a tenth of a second, and was ended."""
    monkeypatch.setattr(door, "QUIET_S", 0.0)
    monkeypatch.setattr(door, "SHAKING_S", WITHIN_S)
    body = review()

    async def main() -> None:
        async with hall(pair) as there:
            slow = Shaking(await there.connect(STRANGER, tls=False))
            await slow.hello()
            for _ in range(door.MOST_OF_ONE - 1):
                await there.connect(STRANGER)
            assert (await there.post(STRANGER, body))[0] == 200
            head = f"POST /validate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            assert await slow.end(head + body) == b"HTTP/1.1 200"

    run(main)


def test_but_not_for_ever(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "SHAKING_S", 0.0)
    monkeypatch.setattr(door, "HANDSHAKE_S", WITHIN_S)
    monkeypatch.setattr(door, "WAIT_S", WITHIN_S)

    async def main() -> None:
        async with hall(pair) as there:
            for _ in range(door.MOST_OF_ONE):
                await Shaking(await there.connect(STRANGER, tls=False)).hello()
            assert (await there.post(STRANGER, review()))[0] == 200

    run(main)


def test_metrics_are_behind_such_a_door_too() -> None:
    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    async def main() -> None:
        async with listening({("GET", "/"): hello}, "127.0.0.1", 0) as port:
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(door.MOST_OF_ONE + 9)]
            connector = aiohttp.TCPConnector(local_addr=(OTHER, 0))
            async with (
                aiohttp.ClientSession(connector=connector) as client,
                client.get(f"http://127.0.0.1:{port}/") as answer,
            ):
                assert await answer.text() == "hello"
            assert await open_ones([reader for reader, _ in silent]) == door.MOST_OF_ONE
            for _, writer in silent:
                writer.transport.abort()

    run(main)


def test_so_is_health() -> None:
    """Connections to it that said half a head took all descriptors of the operator."""

    async def main() -> None:
        async with serve_health("127.0.0.1", 0) as port:
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(door.MOST_OF_ONE + 9)]
            for _, writer in silent:
                writer.write(b"GET /healthz HTTP/1.1\r\nX: ")
            connector = aiohttp.TCPConnector(local_addr=(OTHER, 0))
            async with (
                aiohttp.ClientSession(connector=connector) as client,
                client.get(f"http://127.0.0.1:{port}/healthz") as answer,
            ):
                assert (answer.status, await answer.text()) == (200, "ok\n")
            assert await open_ones([reader for reader, _ in silent]) == door.MOST_OF_ONE
            for _, writer in silent:
                writer.transport.abort()

    run(main)


def test_of_a_spec_that_is_too_large_no_more_is_handed_on_than_shows_that(pair: Path) -> None:
    """kopf copied and went through 95,000 values, while nobody else's reviews had a turn."""
    meta = {"name": "n", "namespace": "ns", "managedFields": [{"manager": "m"}]}
    usual = {"mode": "Unified", "x": [{"a": [1, None]}]}

    async def main() -> None:
        async with hall(pair) as there:
            await there.post(STRANGER, review(object={"metadata": meta, "spec": {"x": [[0] * 90] * 1000}}))
            await there.post(STRANGER, review(object={"metadata": meta, "spec": usual}))
            large, small = (one["request"]["object"] for one in there.asked)
            assert large["metadata"] == small["metadata"] == {"name": "n", "namespace": "ns"}
            assert too_large(large["spec"]) and len(json.dumps(large)) < 40_000
            assert small["spec"] == usual

    run(main)


NESTED = b'{"request": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"no JSON", 400),
        (b"\xff\xfe", 400),
        (b"[]", 400),
        (b"{}", 400),
        (NESTED, 413),
        (b'{"request": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400),
        (b'{"request": []}', 400),
        (b'{"request": {"uid": "u"}}', 400),
        (review(object=None), 400),
        (review(object={"metadata": []}), 400),
        (review(object={"metadata": {"name": "n", "uid": {}}}), 400),
        (review(object={"metadata": {"name": ["n"]}}), 400),
        (review(resource={"group": "apps", "version": "v1", "resource": "deployments"}), 404),
        (review(resource=7), 404),
        (b"x" * (2**20 + 1), 413),
    ],
)
def test_what_is_no_review_is_refused_and_nothing_else_happens(
    pair: Path, body: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with hall(pair) as there:
            assert (await there.post(STRANGER, body))[0] == status
            assert there.asked == []
            assert (await there.post(STRANGER, review()))[0] == 200

    with caplog.at_level(logging.INFO):
        run(main)
    assert not [record for record in caplog.records if record.exc_info]


def test_a_body_that_does_not_come_is_not_waited_for(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "BODY_S", 0.2)

    async def main() -> None:
        async with hall(pair) as there:
            reader, writer = await there.connect(STRANGER)
            writer.write(b"POST /validate HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")

    run(main)


def large_review() -> tuple[bytes, bytes]:
    """One that has to wait for its turn, and the head of a request with it."""
    body = review(object={"metadata": {"name": "large"}, "spec": {"x": "y" * webhook.SMALL}})
    return body, f"POST /validate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()


def test_of_large_reviews_few_are_read_at_once_and_small_ones_pass_them(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "BODY_S", 30.0)
    monkeypatch.setattr(webhook, "LARGE_S", 30.0)
    large, head = large_review()

    async def main() -> None:
        async with hall(pair) as there:
            slow = []
            for number in range(webhook.LARGE_AT_ONCE):
                reader, writer = await there.connect(f"127.0.1.{number + 1}")
                writer.write(head + large[:-1])
                slow.append((reader, writer))
            whole, writer = await there.connect(OTHER)
            writer.write(head + large)
            for _ in range(3):
                assert (await there.post("127.0.0.3", review(), sized=True))[0] == 200
            assert [one["request"]["object"]["metadata"]["name"] for one in there.asked] == ["n"] * 3
            slow[0][1].write(large[-1:])
            assert (await slow[0][0].readline()).startswith(b"HTTP/1.1 200")
            assert (await whole.readline()).startswith(b"HTTP/1.1 200")

    run(main)


def test_addresses_that_send_large_reviews_slowly_do_not_keep_others_out(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them had all turns for as long as they liked."""
    monkeypatch.setattr(webhook, "BODY_S", 30.0)
    monkeypatch.setattr(webhook, "LARGE_S", 0.2)
    large, head = large_review()

    async def main() -> None:
        async with hall(pair) as there:
            slow = []
            for number in range(2 * webhook.LARGE_OF_ONE):
                reader, writer = await there.connect(f"127.0.1.{number % 2 + 1}")
                writer.write(head + large[:-1])
                slow.append((reader, writer))
            for _ in range(3):
                whole, writer = await there.connect(OTHER)
                writer.write(head + large)
                assert (await whole.readline()).startswith(b"HTTP/1.1 200")
            assert len(there.asked) == 3
            ended = [asyncio.ensure_future(reader.readline()) for reader, _ in slow]
            done, rest = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            assert {answer.result()[:12] for answer in done} == {b"HTTP/1.1 408"}
            for waiting in rest:
                waiting.cancel()

    run(main)


def test_of_decoded_reviews_there_is_one_and_one_of_too_many_values_is_not_decoded(pair: Path) -> None:
    dense = review(object={"metadata": {"name": "n"}, "spec": {"x": [[]] * 20_000}})
    denser = review(object={"metadata": {"name": "n"}, "spec": {"x": [[]] * webhook.MOST_VALUES}})
    at_once, most = 0, 0

    async def main() -> None:
        async with hall(pair) as there:

            async def slowly(request: Any, **_: Any) -> Any:
                nonlocal at_once, most
                at_once += 1
                most = max(most, at_once)
                for _ in range(100):  # others would come in meanwhile
                    await asyncio.sleep(0)
                at_once -= 1
                return {"response": {"allowed": True}}

            there.answer = slowly
            answers = await asyncio.gather(*(there.post(f"127.0.1.{number + 1}", dense) for number in range(12)))
            assert [status for status, _ in answers] == [200] * 12
            assert most == 1
            assert (await there.post(STRANGER, denser))[0] == 413

    run(main)


def of_namespace(namespace: str, name: str = "n") -> bytes:
    return review(object={"metadata": {"name": name, "namespace": namespace}})


def test_many_reviews_of_one_namespace_do_not_keep_others_out(pair: Path) -> None:
    """All come from the API server, which is one address: of 150 dry runs at once of one tenant those beyond 48 were
    refused by the door, and with them whatever others asked."""
    storm = 3 * door.MOST_OF_ONE

    async def main() -> None:
        async with hall(pair) as there:
            go = asyncio.Event()

            async def slowly(request: Any, **_: Any) -> Any:
                there.asked.append(request["request"]["object"]["metadata"]["namespace"])
                await go.wait()
                return {"response": {"allowed": True}}

            there.answer = slowly
            answers = [asyncio.create_task(there.post(STRANGER, of_namespace("many"))) for _ in range(storm)]
            most = storm - 1 - turns.MOST_BYTES // turns.LEAST_BYTES  # one is judged, and as many wait as may
            for _, done in zip(range(most), asyncio.as_completed(answers), strict=False):
                status, text = await done
                found = json.loads(text)["response"]
                assert status == 200 and found["uid"] == "u" and found["allowed"] is False
                assert found["status"]["code"] == 429 and found["status"]["details"] == {"retryAfterSeconds": 1}
            came, make_room = asyncio.Event(), there.server._turns._make_room
            there.server._turns._make_room = lambda address: (make_room(address), came.set())
            victim = asyncio.create_task(there.post(STRANGER, of_namespace("few")))
            await came.wait()
            go.set()
            assert json.loads((await victim)[1])["response"]["allowed"] is True
            assert there.asked.index("few") == 1, "it is next"
            assert [status for status, _ in await asyncio.gather(*answers)] == [200] * storm

    run(main)


@pytest.mark.parametrize("tls", [True, False])
def test_who_waits_at_the_door_comes_in_when_others_are_answered(
    tls: bool, pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        go, all_came = asyncio.Event(), asyncio.Event()
        come = door._Guests.come

        def counted(guests: Any, guest: Any, now: float) -> Any:
            entered = come(guests, guest, now)
            if len(guests.waiting) == door.MOST_OF_ONE:
                all_came.set()
            return entered

        monkeypatch.setattr(door._Guests, "come", counted)
        # Else the first, who have asked nothing yet, might give way to the last.
        monkeypatch.setattr(door, "QUIET_S", WITHIN_S)
        monkeypatch.setattr(door, "WAIT_S", WITHIN_S)

        async def slowly(request: web.Request) -> web.Response:
            await go.wait()
            return web.Response(text="done")

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair / "tls.crt", pair / "tls.key")
        handlers = {("GET", "/"): slowly}
        async with listening(handlers, "127.0.0.1", 0, tls=context if tls else None, room=200) as port:
            url = f"{'https' if tls else 'http'}://127.0.0.1:{port}/"

            async def ask() -> tuple[str, str]:
                connector = aiohttp.TCPConnector(ssl=trusting())
                async with aiohttp.ClientSession(connector=connector) as client, client.get(url) as answer:
                    return await answer.text(), answer.headers.get("Connection", "")

            many = [asyncio.create_task(ask()) for _ in range(2 * door.MOST_OF_ONE)]
            await all_came.wait()
            go.set()
            answers = await asyncio.gather(*many)
            assert {text for text, _ in answers} == {"done"}

    run(main)


def test_who_waits_comes_in_when_those_inside_have_said_nothing_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nobody else comes, and nobody is answered."""
    monkeypatch.setattr(door, "QUIET_S", 1.0)

    async def main() -> None:
        async with serve_health("127.0.0.1", 0) as port:
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(door.MOST_OF_ONE)]
            async with aiohttp.ClientSession() as client, client.get(f"http://127.0.0.1:{port}/healthz") as answer:
                assert answer.status == 200
            for _, writer in silent:
                writer.transport.abort()

    run(main)


def test_a_large_review_does_not_give_way_because_this_process_stood_still() -> None:
    async def main() -> None:
        loop, late = asyncio.get_running_loop(), 0.0
        clock = loop.time
        loop.time = lambda: clock() + late  # type: ignore[method-assign]
        large, ended = webhook.Large(), asyncio.Event()

        async def read(address: str) -> None:
            async with asyncio.timeout(1000.0) as timer, large.turn(address, timer):
                await ended.wait()

        readers = [asyncio.create_task(read(f"a{number % 2}")) for number in range(webhook.LARGE_AT_ONCE)]
        waits = asyncio.create_task(read("b"))
        await asyncio.sleep(0)
        late += 30.0
        for _ in range(5):
            await asyncio.sleep(0)
        assert not any(reader.done() for reader in readers)
        ended.set()
        await asyncio.gather(*readers, waits)

    run(main)


def test_kopf_is_not_asked_to_remember_what_anybody_makes_up(pair: Path) -> None:
    async def main() -> None:
        async with hall(pair) as there:
            made_up = {"metadata": {"name": "n", "uid": "made-up"}}
            await there.post(STRANGER, review(operation="UPDATE", object=made_up, oldObject={"spec": {}}))
            (asked,) = there.asked
            assert asked["request"]["operation"] == "CREATE"
            assert "oldObject" not in asked["request"]
            assert asked["request"]["object"] == made_up

    run(main)
