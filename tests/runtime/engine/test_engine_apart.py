"""An engine behind a channel: each request ends once whatever becomes of either side (the socket is a real one)."""

from __future__ import annotations

import asyncio
import errno
import random
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
from engine_stack import Apart, engine_apart
from engine_world import request
from executors import Gated

from isthmus_runtime.engine.backend import EngineBackend
from isthmus_runtime.engine.host import EngineHost
from isthmus_runtime.engine.kv_events import KvEventFeed
from isthmus_runtime.engine.local import LocalEngine
from isthmus_runtime.engine.loop import EngineLoop
from isthmus_runtime.engine.traces import StartTimes
from isthmus_runtime.errors import EngineLost, InvalidRequest, Overloaded, RequestError
from isthmus_runtime.executor.fake import FakeExecutor, expected_tokens
from isthmus_runtime.interfaces.steps import Forced
from isthmus_runtime.request import FinishReason, GenerateRequest, Structure, TokenChunk, TokenLogprobs

DEADLINE_S = 30


def run(main: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def far(backend: EngineBackend) -> Apart:
    assert isinstance(backend.engine, Apart)
    return backend.engine


async def tokens(backend: EngineBackend, asked: GenerateRequest, **names: str) -> list[int]:
    return [t async for c in backend.stream(asked, **names) if isinstance(c, TokenChunk) for t in c.token_ids]


def expected(asked: GenerateRequest) -> list[int]:
    return expected_tokens(asked.prompt_token_ids, asked.sampling, asked.sampling.max_tokens)


async def until(true: Callable[[], object]) -> None:
    """What another thread brings about; the test's deadline bounds it."""
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def until_idle(backend: EngineBackend) -> None:
    loop = far(backend).loop
    while await asyncio.to_thread(loop.call, lambda: loop.scheduler.has_work):
        pass
    await asyncio.to_thread(loop.call, loop.scheduler.check)


def test_many_streams_get_their_tokens() -> None:
    async def main() -> None:
        async with engine_apart() as backend:
            asked = [request(f"r{i}", [i, i + 1, i + 2], 20) for i in range(40)]
            found = await asyncio.gather(*(tokens(backend, one) for one in asked))
            assert found == [expected(one) for one in asked]
            await until_idle(backend)

    run(main)


def test_refusals_of_the_engine_arrive_as_errors() -> None:
    async def main() -> None:
        async with engine_apart() as backend:
            with pytest.raises(InvalidRequest, match="at most 127"):
                await tokens(backend, request("r", [1] * 500, 1))

    run(main)


def test_a_request_that_no_frame_can_hold_is_refused_and_those_beside_it_run() -> None:
    async def main() -> None:
        async with engine_apart() as backend:
            asked = [request(f"r{i}", [1 + i], 4) for i in range(5)]
            asked[2] = replace(asked[2], sampling=replace(asked[2].sampling, max_tokens=2**70))
            asked[3] = replace(asked[3], cache_salt="\ud800")
            asked[4] = replace(asked[4], cache_salt="\ud800")
            names = [{}, {"local_attempt": "l1"}, {}, {}, {"local_attempt": "l4"}]
            streams = [tokens(backend, one, **called) for one, called in zip(asked, names, strict=True)]
            found = await asyncio.gather(*streams, return_exceptions=True)
            for number, (one, what) in enumerate(zip(asked, found, strict=True)):
                if number >= 2:
                    assert isinstance(what, InvalidRequest) and "cannot be passed to the engine" in what.message
                else:
                    assert what == expected(one)

    run(main)


def test_an_id_may_be_used_again_at_once_and_gets_none_of_the_old_tokens() -> None:
    """The engine's replies to the request that was left are still on their way when the next one begins."""

    async def main() -> None:
        print("seed", seed := random.randrange(1 << 30))
        rng = random.Random(seed)
        async with engine_apart() as backend:
            for turn in range(60):
                asked = request("same", [turn + 1] * rng.randint(1, 5), 60)
                stream = backend.stream(asked)
                for _ in range(rng.randint(1, 4)):
                    await anext(stream)
                await stream.aclose()
                again = request("same", [500 + turn], 4)
                assert await tokens(backend, again) == expected(again)
            await until_idle(backend)
            assert not far(backend)._leaving, "what was said of each is over"

    run(main)


def test_thousands_of_cancels_leave_nothing_behind() -> None:
    async def main() -> None:
        print("seed", seed := random.randrange(1 << 30))
        rng = random.Random(seed)
        async with engine_apart(max_waiting=5000) as backend:

            async def one(number: int) -> None:
                stream = backend.stream(request(f"r{number}", [1 + number % 90, 2], 100))
                task = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(rng.random() * 0.2)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await stream.aclose()

            await asyncio.gather(*(one(number) for number in range(2000)))
            await until_idle(backend)
            last = request("last", [5, 6], 8)
            assert await tokens(backend, last) == expected(last)
            assert not far(backend)._leaving and not backend._streams._inboxes

    run(main)


@asynccontextmanager
async def streaming(backend: EngineBackend, count: int) -> AsyncIterator[list[asyncio.Future[RequestError | None]]]:
    """As many streams, each with its first token; how they end."""

    async def one(number: int, begun: asyncio.Event) -> RequestError | None:
        ends = []
        try:
            async for chunk in backend.stream(request(f"r{number}", [number + 1], 100)):
                begun.set()
                assert isinstance(chunk, TokenChunk)
                if chunk.finish_reason is not None:
                    ends.append(chunk.error)
        except RequestError as error:
            begun.set()
            ends.append(error)
        assert len(ends) == 1, "exactly one end"
        return ends[0]

    begun = [asyncio.Event() for _ in range(count)]
    tasks: list[asyncio.Future[RequestError | None]] = [
        asyncio.ensure_future(one(number, event)) for number, event in enumerate(begun)
    ]
    await asyncio.gather(*(event.wait() for event in begun))
    yield tasks


def test_when_the_engine_is_gone_every_request_ends_once_and_later_ones_are_refused() -> None:
    async def main() -> None:
        gated = Gated()
        async with engine_apart(executor=gated) as backend:
            waiting = [asyncio.ensure_future(tokens(backend, request(f"w{i}", [1], 3))) for i in range(20)]
            asking = asyncio.ensure_future(far(backend).is_drained("a"))
            await asyncio.sleep(0)
            far(backend).theirs.shutdown(socket.SHUT_RDWR)
            for one in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(one, EngineLost) and one.attempt is not None
            with pytest.raises(EngineLost):
                await asking
            with pytest.raises(EngineLost):
                await far(backend).is_drained("b")
            with pytest.raises(Overloaded, match="engine process has ended"):
                await tokens(backend, request("late", [1], 3))
            assert "engine process has ended" in backend.ready()
            assert backend.ready() == backend.engine.status().failure
            assert not backend._streams._inboxes
            gated.gate.set()

    run(main)


@pytest.mark.parametrize("after", range(0, 4000, 371))
def test_an_engine_that_breaks_off_anywhere_in_a_frame_ends_every_request(after: int) -> None:
    """Its bytes are cut off after some number of them, as a process that is killed while it writes would."""

    async def main() -> None:
        async with engine_apart() as backend:
            engine, left = far(backend), after
            received = engine._received

            def cut(data: bytes) -> None:
                nonlocal left
                received(data[: max(0, left)])
                left -= len(data)
                if left <= 0:
                    engine.theirs.shutdown(socket.SHUT_RDWR)

            engine._received = cut  # type: ignore[method-assign]
            async with streaming(backend, 8) as tasks:
                for end in await asyncio.gather(*tasks):
                    assert end is None or isinstance(end, EngineLost)

    run(main)


@pytest.mark.parametrize("stops", [False, True], ids=["running", "stopping"])
def test_when_the_api_process_is_gone_the_engine_is_told(stops: bool) -> None:
    async def main() -> None:
        async with engine_apart() as backend:
            engine = far(backend)
            if stops:
                await engine.stop(0.0)
                assert await asyncio.to_thread(engine.host.stop.wait, DEADLINE_S)
            engine.close()
            await until(lambda: engine.lost)
            assert "API process has ended" in engine.lost[0]

    run(main)


def test_a_writer_that_is_first_to_see_the_end_of_the_api_process_says_so() -> None:
    async def main() -> None:
        async with engine_apart() as backend:
            engine = far(backend)

            class Closed:
                def sendall(self, data: bytes) -> None:
                    raise BrokenPipeError(32, "Broken pipe")

            engine.host._sock = Closed()  # type: ignore[assignment]  # for the writer: the reader is in its recv
            await until(lambda: engine.lost)
            assert "API process has ended" in engine.lost[0]

    run(main)


@pytest.mark.parametrize("side", ["to the engine", "from the engine"])
def test_bytes_that_are_no_message_end_the_channel(side: str) -> None:
    async def main() -> None:
        async with engine_apart() as backend:
            engine = far(backend)
            async with streaming(backend, 3) as tasks:
                rubbish = (5).to_bytes(4, "little") + b"hello"
                if side == "to the engine":
                    assert engine._transport is not None
                    engine._transport.write(rubbish)
                    await until(lambda: engine.lost)
                    assert "cannot be read" in engine.lost[0]
                else:
                    await asyncio.to_thread(engine.theirs.sendall, rubbish)
                    ends = await asyncio.gather(*tasks)
                    assert any(isinstance(end, EngineLost) for end in ends)

    run(main)


def test_an_engine_that_says_nothing_is_a_reason_to_restart() -> None:
    async def main() -> None:
        async with engine_apart(silence_s=0.5) as backend:
            engine = far(backend)
            await until(lambda: not engine.status().problem)  # on a busy machine it may have been silent as long
            engine._received = lambda data: None  # type: ignore[method-assign]
            await until(lambda: engine.status().problem)
            problem = engine.status().problem
            assert "has said nothing for" in problem and "(limit 0.5 s)" in problem

    run(main)


def test_requests_are_refused_while_the_engine_does_not_read() -> None:
    async def main() -> None:
        async with engine_apart(max_unread_bytes=200_000, max_waiting=5000) as backend:
            engine, go = far(backend), threading.Event()
            obey = engine.host._obey

            def slow(message: Any) -> None:
                assert go.wait(DEADLINE_S)
                obey(message)

            engine.host._obey = slow  # type: ignore[method-assign]
            asked = [replace(request(f"r{i}", [1 + i % 90], 2), cache_salt="s" * 4000) for i in range(600)]
            running = [asyncio.ensure_future(tokens(backend, one)) for one in asked]
            while not any(task.done() for task in running):
                await asyncio.sleep(0)
                more = replace(request(f"more{len(running)}", [7], 2), cache_salt="s" * 4000)
                asked.append(more)
                running.append(asyncio.ensure_future(tokens(backend, more)))
            go.set()
            found = await asyncio.gather(*running, return_exceptions=True)
            refused = 0
            for one, what in zip(asked, found, strict=True):
                if isinstance(what, Overloaded):
                    refused += 1
                else:
                    assert what == expected(one)
            assert 0 < refused < len(asked)
            await until_idle(backend)

    run(main)


def test_an_api_process_that_does_not_read_holds_no_engine_up() -> None:
    """As one that stands still: the engine computes all that it has, and what it said is there afterwards."""

    async def main() -> None:
        async with engine_apart(executor=FakeExecutor(65, 4)) as backend:
            engine = far(backend)
            engine.theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            transport = cast(asyncio.Transport, engine._transport)
            transport.pause_reading()
            asked = [request(f"r{i}", [i + 1], 100) for i in range(40)]
            running = [asyncio.ensure_future(tokens(backend, one)) for one in asked]
            loop = engine.loop
            await until(lambda: len(running) == len(backend._streams._inboxes))
            while await asyncio.to_thread(loop.call, lambda: loop.scheduler.stats().prefix_queries < len(asked)):
                pass
            await until_idle(backend)
            assert not any(task.done() for task in running)
            transport.resume_reading()
            assert await asyncio.gather(*running) == [expected(one) for one in asked]

    run(main)


def test_status_drains_starts_and_the_prefix_cache_are_told() -> None:
    async def main() -> None:
        feed = KvEventFeed(asyncio.get_running_loop())
        starts = StartTimes(asyncio.get_running_loop().time)
        async with engine_apart(feed=feed, starts=starts) as backend:
            starts.watch("r")
            asked = request("r", list(range(1, 20)), 5)
            assert await tokens(backend, asked) == expected(asked)
            assert starts.of("r") is not None
            assert await backend.engine.is_drained("anything")
            lines = feed.lines()
            seen: list[str] = []
            while len(seen) < 5:
                seen += (await anext(lines)).changes
            assert all(change.startswith("+") for change in seen)
            await until(lambda: backend.engine.status().snapshot.stats.prefix_queries)
            assert backend.engine.status().snapshot.blocks.cached > 0

    run(main)


class Slow:
    """A grammar that compiles when the test allows it, and permits every token."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Event()

    def __call__(self) -> Slow:
        return self

    def known(self, structure: Structure, whose: str) -> None:
        return None

    def guide(self, structure: Structure, whose: str) -> Slow:
        self.begun.set()
        assert self.go.wait(DEADLINE_S)
        if structure.text == "wrong":
            raise InvalidRequest("structure: wrong", param="structure")
        if structure.text == "flaw":
            raise ValueError("a flaw")
        return self

    apart_s = 0.0

    def lost(self) -> None:
        return None

    def allowed(self, generated: object) -> None:
        return None

    def forced(self, generated: object, most: int) -> Forced:
        return Forced()


def structured(rid: str, text: str) -> GenerateRequest:
    return replace(request(rid, [1, 2], 4), structure=Structure("regex", text))


def test_a_request_that_leaves_while_its_grammar_compiles_never_runs() -> None:
    async def main() -> None:
        slow = Slow()

        def local(loop: EngineLoop, host: EngineHost) -> LocalEngine:
            return LocalEngine(loop, host.sink, grammars=slow)  # type: ignore[arg-type]

        async with engine_apart(local=local) as backend:
            engine = far(backend)
            leaves = asyncio.ensure_future(tokens(backend, structured("leaves", "a")))
            told = asyncio.ensure_future(tokens(backend, structured("told", "b")))
            stays = asyncio.ensure_future(tokens(backend, structured("stays", "c")))
            bad = asyncio.ensure_future(tokens(backend, structured("bad", "wrong")))
            flaw = asyncio.ensure_future(tokens(backend, structured("flaw", "flaw")))
            assert await asyncio.to_thread(slow.begun.wait, DEADLINE_S)
            leaves.cancel()
            engine.abort("told", "", "the router says so")
            free = request("free", [3], 4)
            assert await tokens(backend, free) == expected(free), "others go on"
            with pytest.raises(RequestError, match="the router says so"):
                await told
            slow.go.set()
            with pytest.raises(InvalidRequest, match="structure: wrong"):
                await bad
            with pytest.raises(RequestError, match="structured output failed: a flaw"):
                await flaw
            assert len(await stays) == 4
            await until_idle(backend)
            ran = await asyncio.to_thread(engine.loop.call, lambda: engine.loop.scheduler.stats().prefix_queries)
            assert ran == len(free.prompt_token_ids) + 2, "of the structured ones only the one that stayed"

    run(main)


def test_stopping_ends_what_runs_and_says_so_last() -> None:
    async def main() -> None:
        async with engine_apart(executor=FakeExecutor(65, 4)) as backend:
            engine = far(backend)
            async with streaming(backend, 4) as tasks:
                stopping = asyncio.ensure_future(engine.stop(DEADLINE_S))
                assert await asyncio.to_thread(engine.host.stop.wait, DEADLINE_S)
                await asyncio.to_thread(engine.loop.stop)
                await asyncio.to_thread(engine.host.finish, 5.0)
                await stopping
                for end in await asyncio.gather(*tasks):
                    assert end is None or "shutting down" in end.message
            assert not engine.status().failure, "it was asked to"
            assert await engine.is_drained("anything"), "a peer that asks now need not wait for the port to close"
            engine.close()
            await asyncio.to_thread(engine.host._reader.join, DEADLINE_S)
            assert not engine.lost, "all was told before"

    run(main)


def test_a_message_that_the_kernel_cannot_take_ends_the_engine_process() -> None:
    """Its API process would have been told nothing more, and have waited for the end of its patience."""

    class Full:
        def sendall(self, frame: bytes) -> None:
            raise OSError(errno.ENOBUFS, "No buffer space available")

    async def main() -> None:
        async with engine_apart() as backend:
            engine = far(backend)
            engine.host._sock = Full()  # type: ignore[assignment]
            await until(lambda: engine.lost)
            assert engine.lost == ["the channel to the API process broke: [Errno 105] No buffer space available"]
            await asyncio.to_thread(engine.host._writer.join, DEADLINE_S)
            assert not engine.host._writer.is_alive()

    run(main)


def test_many_scores_arrive_in_order_and_as_they_were() -> None:
    async def main() -> None:
        async with engine_apart() as backend:
            scores = tuple(TokenLogprobs(i, -0.5, ((i, -0.5),), 1) for i in range(5000))
            engine = far(backend)

            def told(request: GenerateRequest, **names: object) -> None:
                first = TokenChunk((1,), prompt_logprobs=scores)
                last = TokenChunk((3,), finish_reason=FinishReason.LENGTH)
                engine.host.sink([("r", first), ("r", TokenChunk((2,))), ("r", last)])

            engine.generate = told  # type: ignore[assignment, method-assign]
            found = [chunk async for chunk in backend.generate(request("r", [1], 3))]
            assert [t for chunk in found for t in chunk.token_ids] == [1, 2, 3]
            assert found[0].prompt_logprobs == scores

    run(main)
