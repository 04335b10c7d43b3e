"""Requests while the memory of the process runs short: what they are counted with, and how they end."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

import aiohttp
import pytest

from isthmus_runtime.errors import MemoryShort, Overloaded
from isthmus_runtime.openai.keys import Keys
from isthmus_runtime.openai.lifecycle import Lifecycle
from isthmus_runtime.openai.planning import Planning, planning_takes
from isthmus_runtime.serving import memory
from isthmus_runtime.serving.call import Call
from isthmus_runtime.serving.in_flight import InFlight
from isthmus_runtime.serving.limits import BodyTooLarge
from isthmus_runtime.serving.memory import LOOK_AFTER, MemoryGuard
from isthmus_runtime.serving.port import PortState
from isthmus_runtime.serving.pressure import Level, Use
from isthmus_runtime.sharing.threads_in_turns import go_on, set_aside
from isthmus_runtime.tracing.span import NO_TRACER

GIB = 1 << 30


class Meter:
    """A limit of a gibibyte, and what is used of it as the test says."""

    limit, of = GIB, "the test's limit"

    def __init__(self) -> None:
        self.used = 0

    def read(self) -> Use:
        return Use(self.used, self.used, GIB)


async def until(holds) -> None:
    """The test's own deadline bounds this."""
    while True:
        if holds():
            return
        await asyncio.sleep(0.01)


@pytest.fixture
def ports(monkeypatch):
    """The books of the ports that are opened."""
    found, init = [], PortState.__init__

    def noted(self, *args) -> None:
        init(self, *args)
        found.append(self)

    monkeypatch.setattr(PortState, "__init__", noted)
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_what_an_answer_repeats_counts_for_its_client_until_it_is_complete(run, serve, ports, stream) -> None:
    told = "word " * 2000

    async def main() -> None:
        go = asyncio.Event()
        body = {"model": "tiny", "input": "hi", "instructions": told, "max_output_tokens": 2, "stream": stream}
        async with serve(lambda r: [40, go, 41]) as api, aiohttp.ClientSession() as session:
            api.backend.max_model_len = 1 << 20
            asked = asyncio.create_task(session.post(f"{api.url}/v1/responses", json=body))
            await until(lambda: api.backend.requests)
            (port,) = ports
            (connection,) = port.connections
            assert port.bodies.used == 0, "others may have the room"
            ids = 12 * len(api.backend.requests[0].prompt_token_ids)
            assert len(told) <= connection.held({}) - ids < len(told) + 1000
            go.set()
            async with await asked as answer:
                assert answer.status == 200
                await answer.read()
            await until(lambda: connection.held({}) == 0)

    run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_has_to_end_is_told_so_once(run, serve, stream) -> None:
    async def main() -> None:
        meter, more = Meter(), asyncio.Event()
        guard = MemoryGuard(meter)
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 9, "stream": stream}
        async with serve(lambda r: [40, more], memory=guard) as api, aiohttp.ClientSession() as session:
            asked = asyncio.create_task(session.post(f"{api.url}/v1/completions", json=body))
            answer = await asked if stream else None
            if answer is not None:
                await answer.content.readuntil(b"\n\n")
            await api.backend.started.wait()
            meter.used = GIB - (1 << 20)
            guard.look()
            async with answer or await asked as answer:
                assert answer.status == (200 if stream else 503)
                text = (await answer.read()).decode()
            errors = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if '"error"' in line]
            assert len(errors) == 1
            error = errors[0]["error"]
            assert (error["code"], error["stage"]) == ("memory_short", "memory") and error["attempt"]
            await until(lambda: api.backend.ended == ["closed"] and not len(api.in_flight))
            assert api.metric('isthmus_request_failures_total{code="memory_short"') == 1
            await until(lambda: guard.told == "calm")  # whatever is used is nobody's request

    run(main())


def _lifecycle(planning: Planning) -> Lifecycle:
    return Lifecycle(
        Keys("", None, monotonic),
        None,
        timeout_s=20.0,
        in_flight=InFlight(),
        metrics=None,
        tenant_metrics=None,
        tracer=NO_TRACER,
        planning=planning,
        clock=monotonic,
    )


@pytest.mark.parametrize("leaves", [False, True])
def test_large_bodies_are_planned_one_at_a_time_where_there_is_no_room_for_several(run, leaves) -> None:
    """Each takes many times its size on its way, and what was free when it began is then taken by others."""

    async def main() -> None:
        guard = MemoryGuard(Meter())
        guard.start()
        planning = Planning(guard)
        begun, may_end = [], {"a": threading.Event(), "b": threading.Event(), "c": threading.Event()}

        def plan(body: bytes) -> str:
            name = body[:1].decode()
            begun.append(name)
            assert may_end[name].wait(20)
            return name

        def planned(name: str, size: int, host: str) -> asyncio.Task[str]:
            return asyncio.create_task(planning.long(host, plan, name.encode() * size))

        large, small = 7_500_000, 70_000
        assert guard.room is not None and planning_takes(large) < 3 * guard.room // 8 < 2 * planning_takes(large)
        first = planned("a", large, "127.0.0.1")
        await until(lambda: begun == ["a"])
        second = planned("b", large, "127.0.0.2")
        await asyncio.sleep(0)
        may_end["c"].set()
        assert await planned("c", small, "127.0.0.3") == "c", "what is small goes on"
        if leaves:
            first.cancel()
            with suppress(asyncio.CancelledError):
                await first
            may_end["c"].set()
            assert await planned("c", small, "127.0.0.3") == "c"
        assert "b" not in begun, "the first one's memory is not there again before its thread has ended"
        may_end["a"].set()
        await until(lambda: "b" in begun)
        may_end["b"].set()
        assert await second == "b"
        guard.close()

    run(main())


def test_a_plan_that_takes_long_ends_where_others_wait_for_its_memory(run, monkeypatch) -> None:
    """Two requests of 650 KB kept everybody's bodies waiting for a minute. What is small waits for none of them."""
    monkeypatch.setattr("isthmus_runtime.openai.planning.MOST_HELD_S", 0.0)

    async def main() -> None:
        guard = MemoryGuard(Meter())
        guard.start()
        planning = Planning(guard)
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        def long(body: bytes) -> int:
            loop.call_soon_threadsafe(begun.set)
            while True:
                go_on()

        first = asyncio.create_task(planning.long("127.0.0.1", long, b"x" * 7_500_000))
        await begun.wait()
        holds_nothing = asyncio.create_task(planning.long("127.0.0.3", long, b"x" * 60_000))
        assert await planning.long("127.0.0.2", len, b"x" * 70_000) == 70_000
        assert not first.done()
        assert await planning.long("127.0.0.2", len, b"x" * 7_500_000) == 7_500_000
        with pytest.raises(Overloaded, match="long texts"):
            await first
        assert not holds_nothing.done()
        holds_nothing.cancel()
        assert planning._large.used == planning._small.used == 0
        guard.close()

    run(main())


def test_a_body_of_which_too_much_is_made_for_this_limit_is_refused_for_good(run) -> None:
    """Of 512 MiB a router has 190 for what is made of bodies: one of 14 MB took 350, and the process 622."""

    async def main() -> None:
        meter = Meter()
        meter.used = 600 << 20
        guard = MemoryGuard(meter)
        guard.start()
        planning = Planning(guard)
        assert guard.room_on_the_way is not None
        most = guard.room_on_the_way // 26
        assert 7 << 20 < most < 9 << 20
        assert await planning.long("127.0.0.1", len, bytes(most)) == most
        with pytest.raises(BodyTooLarge, match=f"the body has {most + 1} bytes.* leaves room for {most}; .*limit"):
            await planning.long("127.0.0.1", len, bytes(most + 1))
        assert planning._large.used == planning._small.used == 0 and guard.level is Level.CALM
        guard.close()

    run(main())


@pytest.mark.parametrize("comes_back", [True, False])
def test_before_a_large_plan_what_it_may_take_is_there_or_it_is_refused(run, monkeypatch, comes_back) -> None:
    """Heaps of threads that had planned before kept 618 MiB, of which nobody was told, and one more was too much."""

    async def main() -> None:
        guard, given = MemoryGuard(Meter()), []
        guard.start()

        def give_back() -> None:
            given.append(threading.current_thread().name)
            guard._use.used -= (GIB // 2) * comes_back

        monkeypatch.setattr(memory, "give_back", give_back)
        planning = Planning(guard)
        guard._use.used = 79 * GIB // 100
        small, large = 70_000, 7_500_000
        assert planning_takes(small) < 21 * GIB // 100 < planning_takes(large)
        assert await planning.long("127.0.0.1", len, b"x" * small) == small
        assert guard.level is Level.CALM and not given
        asked = [planning.long("127.0.0.1", len, b"x" * large) for _ in range(2)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        if comes_back:
            assert found == [large, large]
        else:
            told = f"may take {planning_takes(large) >> 20} MiB on its way"
            assert all(isinstance(one, MemoryShort) and told in one.message for one in found)
        assert given[0].startswith("trim") and len(given) == 1 + (not comes_back)
        assert planning._large.used == planning._small.used == 0
        guard.close()

    run(main())


def test_what_another_process_may_take_is_there_beside_plans_or_its_text_is_refused(run) -> None:
    """Each was held against what was free, and not against the other: a chat of 15.9 MB and a text of digits."""

    async def main() -> None:
        guard = MemoryGuard(Meter())
        with guard.elsewhere() as room:
            assert room is None
        guard.start()
        planning, may_end = Planning(guard), threading.Event()
        assert guard.room is not None and guard._use is not None
        most = guard.room // 4

        def used(size: int) -> None:
            assert guard._use is not None
            guard._use.used = size
            guard.look()

        def lent(own: int = 0) -> int | None:
            with guard.elsewhere(own) as room:
                return room

        used(GIB - most)
        assert lent() == most
        used(GIB - most + 1)
        with pytest.raises(MemoryShort, match=f"1024 MiB are used, and {most >> 20} MiB are needed beside it"):
            lent()
        # A plan, and then a text beside it: of the plan's own it is not asked again.
        size = 7_500_000
        takes = planning_takes(size)
        used(GIB - most - takes + 1)
        told: list[int | None] = []
        plan = asyncio.create_task(
            planning.long("a", lambda body: told.append(lent(set_aside())) or may_end.wait(20), bytes(size))
        )
        await until(lambda: told == [most])
        with pytest.raises(MemoryShort):
            lent()
        # Another plan is not refused for what the first one has set aside, and may have taken.
        used(GIB - takes)
        assert await planning.long("b", len, bytes(100_000)) == 100_000
        may_end.set()
        await plan
        # A text, and then a plan beside it.
        used(GIB - most)
        with guard.elsewhere(), pytest.raises(MemoryShort, match="on its way"):
            await planning.long("a", len, bytes(size))
        assert await planning.long("a", len, bytes(size)) == size
        guard.close()

    run(main())


@pytest.mark.parametrize(("size", "counts"), [(1 << 16, False), (1 << 19, True)])
def test_what_is_counted_without_an_engine_sets_its_memory_aside_too(run, size, counts) -> None:
    async def main() -> None:
        planning, used = Planning(MemoryGuard()), []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"x" * size, "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                assert message["status"] == 200

        def make(body: bytes) -> bytes:
            used.append(planning._small.used)
            return b"{}"

        call = Call({"type": "http", "path": "/tokenize", "headers": [], "client": ("127.0.0.1", 1)}, receive, send)
        await _lifecycle(planning).compute(call, make, 1 << 20)
        assert used == [planning_takes(size) * counts]
        await until(lambda: planning._small.used == 0)

    run(main())


def test_one_client_s_bodies_leave_room_for_another_s(run) -> None:
    """What waits for a thread with its memory set aside, seventeen bodies of 72 KB, held up another's for seconds."""

    async def main() -> None:
        guard = MemoryGuard(Meter())
        guard.start()
        planning, may_end, begun = Planning(guard), threading.Event(), []

        def plan(body: bytes) -> int:
            begun.append(len(body))
            assert may_end.wait(20)
            return len(body)

        theirs = [asyncio.create_task(planning.long("127.0.0.1", plan, b"x" * 72_000)) for _ in range(17)]
        await until(lambda: len(begun) == 1)
        assert await planning.long("127.0.0.2", len, b"x" * 70_000) == 70_000
        assert await planning.long("127.0.0.2", len, b"x" * 140_000) == 140_000
        may_end.set()
        assert await asyncio.gather(*theirs) == [72_000] * 17
        assert planning._small.used == 0
        guard.close()

    run(main())


def test_what_is_counted_in_turn_sets_its_memory_aside_when_it_has_it(run) -> None:
    """There are two threads: those who waited for them held what others' prompts wait for."""

    async def main() -> None:
        planning, used, may_end = Planning(MemoryGuard()), list[int](), threading.Event()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"x" * 100_000, "more_body": False}

        async def send(message: Any) -> None:
            assert message.get("status", 200) == 200

        def make(body: bytes) -> bytes:
            assert may_end.wait(20)
            used.append(planning._small.used)
            return b"{}"

        scope = {"type": "http", "path": "/tokenize", "headers": []}
        calls = [Call({**scope, "client": (f"127.0.0.{n}", 1)}, receive, send) for n in range(4)]
        lifecycle = _lifecycle(planning)
        asked = [asyncio.create_task(lifecycle.compute(call, make, 1 << 20)) for call in calls]
        await until(lambda: planning._small.used and len(planning._may_compute._first) == 2)
        may_end.set()
        await asyncio.gather(*asked)
        assert len(used) == 4 and max(used) <= 2 * planning_takes(100_000), "no more than have a thread"

    run(main())


def test_what_is_small_is_counted_beside_what_is_large(run) -> None:
    """Two connections with a megabyte of digits each kept everybody's few words waiting for seven seconds."""

    async def main() -> None:
        lifecycle, may_end, begun, told = (
            _lifecycle(Planning(MemoryGuard())),
            threading.Event(),
            threading.Event(),
            list[int](),
        )

        def make(body: bytes) -> bytes:
            if len(body) > 70_000:
                begun.set()
                assert may_end.wait(20)
            return b"%d" % len(body)

        def call(host: str, size: int) -> Call:
            async def receive() -> dict[str, Any]:
                return {"type": "http.request", "body": b"x" * size, "more_body": False}

            async def send(message: Any) -> None:
                if "body" in message:
                    told.append(int(message["body"]))

            return Call({"type": "http", "path": "/tokenize", "headers": [], "client": (host, 1)}, receive, send)

        large = [asyncio.create_task(lifecycle.compute(call("127.0.0.1", 100_000), make, 1 << 20)) for _ in range(2)]
        assert await asyncio.to_thread(begun.wait, 20)
        await lifecycle.compute(call("127.0.0.2", 10), make, 1 << 20)
        await lifecycle.compute(call("127.0.0.2", 70_000), make, 1 << 20)  # one client has one thread of two
        assert told == [10, 70_000]
        may_end.set()
        await asyncio.gather(*large)
        assert told == [10, 70_000, 100_000, 100_000]

    run(main())


class Late(Executor):
    """Its threads begin what they get when they are told to."""

    def __init__(self) -> None:
        self.works = list[tuple[Future[Any], Callable[[], Any]]]()

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        self.works.append((future := Future(), partial(work, *given, **named)))
        return future

    def go(self) -> None:
        for future, work in self.works:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
        self.works.clear()


@pytest.mark.parametrize("at", range(6))
def test_who_leaves_at_any_moment_gives_back_what_planning_takes_once(run, at) -> None:
    """Its thread may begin all the same, a moment later: memory that was given back twice was there for one more."""

    async def main() -> None:
        planning, late = Planning(MemoryGuard()), Late()
        planning._planners._threads = late
        task = asyncio.create_task(planning.long("127.0.0.1", len, b"x" * 100_000))
        for _ in range(at):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        late.go()
        for _ in range(5):
            await asyncio.sleep(0)
        assert (planning._small.used + planning._large.used) == 0
        left = asyncio.create_task(planning.long("127.0.0.1", len, b"x" * 100_000))
        await until(lambda: late.works)
        assert (planning._small.used + planning._large.used) == planning_takes(100_000)
        late.go()
        assert await left == 100_000 and (planning._small.used + planning._large.used) == 0

    run(main())


def test_large_bodies_are_planned_side_by_side_where_there_is_room(run) -> None:
    async def main() -> None:
        planning = Planning(MemoryGuard())
        meet = threading.Barrier(2)
        plan = partial(_met, meet)
        both = [
            asyncio.create_task(planning.long(host, plan, b"x" * (LOOK_AFTER + 1)))
            for host in ("127.0.0.1", "127.0.0.2")
        ]
        assert await asyncio.gather(*both) == ["met", "met"]

    run(main())


def _met(meet: threading.Barrier, body: bytes) -> str:
    meet.wait(20)
    return "met"
