"""What clients have not read is bounded, all of them together: who has most of it gives way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any, cast

from engine_stack import engine
from engine_world import request

from isthmus_runtime.engine.local import LocalEngine
from isthmus_runtime.engine.streams import Streams
from isthmus_runtime.errors import Cancelled
from isthmus_runtime.executor.fake import FakeExecutor
from isthmus_runtime.request import FinishReason, TokenChunk, TokenLogprobs

SCORED = TokenChunk(token_ids=(1,), logprobs=(TokenLogprobs(1, -1.0, ((1, -1.0), (2, -2.0))),))
"""8 numbers."""


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 60))


def test_who_has_most_unread_gives_way_and_nobody_else() -> None:
    async def main() -> None:
        streams = Streams(asyncio.get_running_loop(), most=40)
        told: list[str] = []
        slow = streams.open("slow", lambda: told.append("slow"))
        quick = streams.open("quick", lambda: told.append("quick"))
        for _ in range(4):
            streams.deliver([("slow", SCORED), ("quick", SCORED)])
            assert await quick.get() == SCORED
        assert (slow.unread, quick.unread, told) == (32, 0, [])
        streams.deliver([("quick", SCORED), ("slow", SCORED)])
        assert told == [], "readers come first"
        await asyncio.sleep(0)
        assert told == ["slow"]
        streams.deliver([("slow", SCORED), ("quick", SCORED)])
        last = await slow.get()
        assert isinstance(last, TokenChunk) and last.finish_reason is FinishReason.ERROR
        assert isinstance(last.error, Cancelled) and "reads too slowly: 40 numbers" in last.error.message
        streams.deliver([("slow", SCORED)])
        streams.end_all(Cancelled("all end"))
        assert slow._queue.empty(), "one end alone"
        assert [await quick.get(), await quick.get()] == [SCORED, SCORED]
        assert told == ["slow"]

    run(main)


def test_requests_of_whom_nothing_is_known_are_a_client_each() -> None:
    async def main() -> None:
        streams, told = Streams(asyncio.get_running_loop(), most=100), list[str]()
        for sid, whose in (("greedy", "a"), *((f"b{i}", "") for i in range(8))):
            streams.open(sid, lambda sid=sid: told.append(sid), whose)  # type: ignore[misc]
        streams.deliver([("greedy", SCORED)] * 6)
        streams.deliver([(f"b{i}", SCORED) for i in range(8)])
        await asyncio.sleep(0)
        assert told == ["greedy"]

    run(main)


def test_the_client_with_most_unread_gives_way_and_not_who_has_the_largest_answer() -> None:
    async def main() -> None:
        streams, told = Streams(asyncio.get_running_loop(), most=100), list[str]()
        for sid, whose in (("mine", "a"), *((f"b{i}", "b") for i in range(6))):
            streams.open(sid, lambda sid=sid: told.append(sid), whose)  # type: ignore[misc]
        streams.deliver([("mine", SCORED)] * 4)
        streams.deliver([(f"b{i}", SCORED) for i in range(6)] * 2)
        await asyncio.sleep(0)
        assert told and set(told) < {f"b{i}" for i in range(6)}
        assert sum(inbox.unread for sid, inbox in streams._inboxes.items() if sid not in told) <= 100

    run(main)


def test_a_loop_that_was_held_up_ends_nobody_who_reads() -> None:
    """All that came meanwhile is delivered in one turn of it."""

    async def main() -> None:
        streams, told = Streams(asyncio.get_running_loop(), most=40), list[str]()
        inbox = streams.open("quick", lambda: told.append("quick"))

        async def reads() -> int:
            for _ in range(20):
                assert await inbox.get() == SCORED
            return 20

        reader = asyncio.ensure_future(reads())
        await asyncio.sleep(0)
        for _ in range(20):
            streams.deliver([("quick", SCORED)])
        assert await reader == 20 and not told

    run(main)


def test_a_reader_that_is_too_slow_ends_and_its_row_with_it() -> None:
    async def main() -> None:
        with engine(executor=FakeExecutor(4097, 4), num_blocks=4097, max_model_len=16_000) as backend:
            aborted: list[str] = []
            abort = backend.engine.abort

            def noted(request_id: str, attempt: str, reason: str, *, answer: bool = True) -> None:
                aborted.append(reason)
                abort(request_id, attempt, reason, answer=answer)

            backend.engine.abort = noted  # type: ignore[method-assign]
            async with aclosing(backend.stream(request("slow", [1, 2, 3], 15_000))) as slow:
                chunks = [await anext(slow)]
                backend._streams._most = 20
                inbox = backend._streams._inboxes["slow"]
                while not inbox.given_up:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                assert aborted == ["the client reads too slowly"]
                chunks += [chunk async for chunk in slow]
            assert len(chunks) == 2 and isinstance(chunks[1], TokenChunk) and isinstance(chunks[1].error, Cancelled)
            loop = cast(LocalEngine, backend.engine).loop
            while await asyncio.to_thread(loop.call, lambda: loop.scheduler.has_work):
                pass
            await asyncio.to_thread(loop.call, loop.scheduler.check)
            assert not backend._streams._inboxes and len(aborted) == 1

    run(main)
