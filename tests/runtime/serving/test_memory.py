"""A port whose process nears the limit of its memory: what it refuses, whom it ends, and that it serves again."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
import serving
from serving import parse

from isthmus_runtime.errors import ConfigError, MemoryShort, error_from_json
from isthmus_runtime.heap import give_back
from isthmus_runtime.serving.access import OF_RUNNING
from isthmus_runtime.serving.admission import BodyBudget
from isthmus_runtime.serving.app import make_app
from isthmus_runtime.serving.call import Call, add_call_route
from isthmus_runtime.serving.in_flight import InFlight
from isthmus_runtime.serving.limits import Limits
from isthmus_runtime.serving.memory import LARGE_BODY, MemoryGuard
from isthmus_runtime.serving.memory_use import find_limit
from isthmus_runtime.serving.pressure import USUAL, Use
from isthmus_runtime.serving.server import Server

MIB = 1 << 20
LIMIT = 1000 * MIB
START = 100 * MIB
LARGE = b"x" * (LARGE_BODY + 1)


class Meter:
    """A limit, and what is used of it as the test says."""

    limit = LIMIT
    of = "the test's limit"

    def __init__(self) -> None:
        self.used = START

    def add(self, pid: int) -> None:
        """Of the processes that work for this one."""

    def read(self) -> Use:
        return Use(self.used, self.used, LIMIT)

    def fill(self, share: float) -> None:
        """So much of what requests may have."""
        self.used = START + USUAL + int((LIMIT - START - USUAL) * share)


class Port:
    """A port whose calls answer at once, or where the body says so when they are told to."""

    def __init__(self) -> None:
        self.meter, self.in_flight = Meter(), InFlight()
        self.refused: list[str] = []
        self.guard = MemoryGuard(self.meter, refused=self.refused.append)
        self.go = asyncio.Event()
        self.waiting = 0
        self.ended: list[int] = []
        """What those held that had to end."""
        self.port = 0
        self.servers: list[Server] = []

    @property
    def bodies(self) -> BodyBudget:
        return self.servers[0].server_state.bodies

    async def call(self, call: Call) -> None:
        try:
            with self.in_flight.track():
                body = await call.read()
                kept = json.loads(body)["kept"] if body.startswith(b"{") else None
                if kept is None:
                    await call.reply(200, {}, b"%d" % len(body))
                    return
                call.drop(kept, json.loads(body)["who"])
                self.waiting += 1
                try:
                    await self.go.wait()
                except asyncio.CancelledError:
                    self.ended.append(kept)
                    raise
                await call.reply(200, {}, b"waited")
        except asyncio.CancelledError:
            error = self.in_flight.cancelled()
            if error is None:
                raise
            raise error from None

    async def raw(self, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        return answer

    async def status(self, data: bytes) -> int:
        return parse(await self.raw(data))[0][0]

    def look(self, share: float) -> None:
        self.meter.fill(share)
        self.guard.look()


@asynccontextmanager
async def served(**limits):
    port = Port()
    app = make_app("memory", bodies=())
    add_call_route(app, "/v1/completions", port.call, "POST")

    async def commit(call: Call) -> None:
        await call.reply(200, {}, await call.read())

    for path in OF_RUNNING:
        add_call_route(app, path.decode(), commit, "POST")

    async def health() -> dict[str, str]:
        return {"memory": port.guard.told}

    app.add_api_route("/health", health)

    class Noted(Server):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            port.servers.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isthmus_runtime.serving.server.Server", Noted)
        async with serving.served(
            app, in_flight=port.in_flight, memory=port.guard, limits=Limits(**limits)
        ) as port.port:
            yield port


async def until(holds) -> None:
    """The test's own deadline bounds this."""
    while True:
        if holds():
            return
        await asyncio.sleep(0.01)


def post(body: bytes, *fields: str, close: bool = False) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *fields]
    lines += ["Connection: close"] if close else []
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def run(main) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


PLAIN = post(LARGE, close=True)
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"%x\r\n%b\r\n0\r\n\r\n" % (len(LARGE), LARGE)
)
INFLATING = post(gzip.compress(LARGE), "Content-Encoding: gzip", close=True)


@pytest.mark.parametrize("request_", [PLAIN, CHUNKED, INFLATING], ids=["plain", "chunked", "inflating"])
def test_while_memory_is_tight_large_bodies_are_refused_and_others_are_not(request_) -> None:
    async def main() -> None:
        async with served() as port:
            assert await port.status(request_) == 200
            port.look(0.85)
            (status, headers, body), *more = parse(await port.raw(request_))
            error = json.loads(body)["error"]
            assert (status, error["code"], headers["retry-after"], more) == (503, "memory_short", "1", [])
            assert f"of {LIMIT // MIB} MiB are used" in error["message"]
            assert await port.status(post(b"x" * 1000, close=True)) == 200
            assert port.refused == ["body"]
            port.look(0.5)
            assert await port.status(request_) == 200

    run(main())


@pytest.mark.parametrize("asked", [256 * MIB, 4096 * MIB])
def test_bodies_have_a_third_of_what_requests_may_take_at_most(asked, caplog) -> None:
    """4,000 of 60 KB at once are there before anybody looks at the memory: a bound of its own has to hold them."""

    async def main() -> None:
        async with served(max_body_memory=asked) as port:
            most = (LIMIT - START - USUAL) // 3
            assert port.bodies.most == min(asked, most)
            told = [one.getMessage() for one in caplog.records if "--max-body-memory" in one.getMessage()]
            assert len(told) == (asked > most) and all(str(asked) in one and str(most) in one for one in told)
            assert await port.status(post(b"x", close=True)) == 200

    run(main())


def test_a_body_that_is_on_its_way_when_memory_becomes_tight_is_refused() -> None:
    async def main() -> None:
        async with served() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
            writer.write(post(LARGE * 3)[:-LARGE_BODY])
            await until(lambda: len(port.in_flight) == 1)
            port.look(0.85)
            writer.write(b"x" * 1000)  # the rest never comes
            assert parse(await asyncio.wait_for(reader.read(), 20))[0][0] == 503
            writer.close()
            await until(lambda: not len(port.in_flight))

    run(main())


def test_a_small_request_behind_one_that_keeps_much_is_no_large_body() -> None:
    async def main() -> None:
        async with served() as port:
            kept = json.dumps({"who": "a", "kept": 2 * LARGE_BODY}).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
            writer.write(post(kept))
            await until(lambda: port.waiting == 1)
            port.look(0.85)
            writer.write(post(b"next", close=True))
            await until(lambda: port.bodies.used > len(b"next"))
            port.go.set()
            assert [each[0] for each in parse(await asyncio.wait_for(reader.read(), 20))] == [200, 200]
            writer.close()
            assert not port.refused

    run(main())


def test_a_request_that_waits_and_is_refused_is_not_run_with_what_is_left_of_its_body(monkeypatch) -> None:
    """Its end came with the bytes that it was refused for."""
    monkeypatch.setattr("isthmus_runtime.serving.protocol.LARGE_BODY", 100)  # what one read surely has

    async def main() -> None:
        async with served() as port:
            kept = json.dumps({"who": "a", "kept": 1}).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
            writer.write(post(kept))
            await until(lambda: port.waiting == 1)
            port.look(0.85)
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            writer.write(head + b"%x\r\n%b\r\n" % (101, b"x" * 101) + b"2\r\nyy\r\n0\r\n\r\n")
            await until(lambda: port.refused)
            port.go.set()
            first, second = parse(await asyncio.wait_for(reader.read(), 20))
            assert (first[0], second[0], json.loads(second[2])["error"]["code"]) == (200, 503, "memory_short")
            writer.close()
            await until(lambda: not port.bodies.used)

    run(main())


def test_a_refusal_holds_nothing_of_what_was_read() -> None:
    """As the traceback of an error does: thousands that were refused had kept their bodies until the collector came."""

    async def main() -> None:
        async with served() as port:
            port.look(0.85)
            reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
            writer.write(PLAIN[:-1])
            assert parse(await asyncio.wait_for(reader.read(), 20))[0][0] == 503
            (connection,) = port.servers[0].server_state.connections  # it waits for us to hang up
            assert connection.refusal is not None and connection.refusal.__traceback__ is None
            assert not connection.headers
            writer.close()

    run(main())


def test_while_it_is_critical_nothing_is_taken_but_probes_and_what_peers_say() -> None:
    async def main() -> None:
        async with served() as port:
            port.in_flight.add(asyncio.current_task())  # what is used is not nobody's
            port.look(0.95)
            (status, _, body), *_ = parse(await port.raw(post(b"x", close=True)))
            assert status == 503 and json.loads(body)["error"]["code"] == "memory_short"
            health = await port.raw(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert json.loads(parse(health)[0][2]) == {"memory": "critical"}
            for path in OF_RUNNING:
                said = post(b"ok", close=True).replace(b"/v1/completions", path)
                assert parse(await port.raw(said))[0][2] == b"ok"
            assert port.refused == ["request"]
            port.in_flight.remove(asyncio.current_task())

    run(main())


def test_while_it_is_critical_the_largest_of_the_client_with_most_ends_and_then_the_next() -> None:
    """Each exactly once; whoever is left is served."""

    async def main() -> None:
        async with served() as port:
            sizes = [("a", 500), ("b", 300), ("b", 400), ("c", 600)]
            asked = []
            for who, kept in sizes:
                body = json.dumps({"who": who, "kept": kept}).encode()
                asked.append(asyncio.create_task(port.raw(post(body, close=True))))
            await until(lambda: port.waiting == len(sizes))
            port.look(0.95)
            await until(lambda: len(port.ended) >= 2)
            port.look(0.1)
            port.go.set()
            answers = [parse(await one) for one in asked]
            assert port.ended == [400, 600, 500, 300][: len(port.ended)]
            assert port.refused == ["ended"] * len(port.ended)
            assert all(len(each) == 1 for each in answers)
            assert [each[0][0] for each in answers] == [503 if kept in port.ended else 200 for _, kept in sizes]
            error = json.loads(answers[2][0][2])["error"]
            assert (error["code"], error["stage"]) == ("memory_short", "memory") and "400 bytes" in error["message"]

    run(main())


def test_what_is_kept_of_a_body_counts_for_its_client_and_leaves_others_their_room() -> None:
    async def main() -> None:
        async with served() as port:
            body = json.dumps({"who": "a", "kept": 10, "pad": "x" * 1000}).encode()
            asked = asyncio.create_task(port.raw(post(body, close=True)))
            await until(lambda: port.waiting == 1)
            (connection,) = port.servers[0].server_state.connections
            assert port.bodies.used == 0 and (connection.who, connection.held({})) == ("a", 10)
            port.go.set()
            await asked

    run(main())


def test_who_is_alone_and_holds_nothing_serves_however_much_is_used() -> None:
    async def main() -> None:
        async with served() as port:
            port.look(0.95)
            await until(lambda: port.guard.told == "calm")  # nobody is there: it is no request's
            assert await port.status(PLAIN) == 200

    run(main())


def test_files_that_cannot_be_read_refuse_nobody(caplog) -> None:
    meter = Meter()
    guard = MemoryGuard(meter)
    guard.start()
    meter.fill(0.95)
    guard.look()
    assert guard.critical

    def torn() -> Use:
        raise ValueError("invalid literal for int() with base 10: ''")

    meter.read = torn
    guard.look()
    guard.close()
    assert guard.told == "calm"


def test_a_limit_below_what_a_process_has_at_its_start_is_refused() -> None:
    guard = MemoryGuard(find_limit(MIB, log=pytest.fail))
    with pytest.raises(ConfigError, match=r"--memory-limit: 1048576 bytes are less than the \d+ .* raise it"):
        guard.start()


def test_the_log_says_that_it_has_become_worse_and_not_each_refusal(caplog) -> None:
    meter, now = Meter(), [0.0]
    guard = MemoryGuard(meter, clock=lambda: now[0])
    guard.start()
    caplog.clear()  # what a start says is told where an earlier test has left the log at INFO
    with caplog.at_level(logging.WARNING):
        for share in (0.85, 0.95, 0.95, 0.86):
            meter.fill(share)
            guard.look()
            for _ in range(100):
                guard.large()
    guard.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * len(caplog.records)
    assert len(caplog.records) <= 3 and "critical" in caplog.text


def test_memory_that_is_free_goes_back_to_the_kernel() -> None:
    use = find_limit(1 << 40, log=pytest.fail)
    assert use is not None
    held = [bytes(20_000) for _ in range(5_000)]  # of the heap, not mapped by themselves
    kept = held[::100]
    full = use.read().mine
    held.clear()
    give_back()
    assert full - use.read().mine > 50 * MIB
    del kept


_THREADS_WITH_TEXTS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from isthmus_runtime.heap import give_back, map_large_blocks, share_heaps
from isthmus_runtime.serving.memory_use import find_limit

def plan(number):
    together.wait(20)
    for _ in range(3):
        text = "\U0001f600" * (7 << 20)
        del text

if sys.argv[1] == "let go":
    map_large_blocks()
if sys.argv[1] == "share":
    share_heaps()
use = find_limit(1 << 40, log=print)
together, before = Barrier(6), use.read().mine
with ThreadPoolExecutor(6) as threads:
    list(threads.map(plan, range(6)))
    give_back()
    print((use.read().mine - before) >> 20)
"""


def _kept(how: str) -> int:
    argv = [sys.executable, "-c", _THREADS_WITH_TEXTS, how]
    return int(subprocess.run(argv, capture_output=True, check=True, text=True, timeout=60).stdout)


def test_threads_keep_nothing_of_the_texts_that_they_have_planned() -> None:
    """Six have had a text of 28 MiB each. By itself the heap of each keeps that for ever."""
    assert _kept("as it is") > 100, "nothing to let go of here"
    assert _kept("let go") < 30
    assert _kept("share") < 75, "two heaps, of which one is the process's own"


def test_errors_of_memory_survive_a_hop() -> None:
    error = MemoryShort("memory: 9 of 10 MiB are used")
    again = error_from_json(503, error.to_json())
    assert type(again) is MemoryShort and again.to_json() == error.to_json()
