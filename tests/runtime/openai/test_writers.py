"""Large answers are written by few threads, in turns, and not to their end where nobody waits for it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import pytest

from isthmus_runtime.errors import Cancelled
from isthmus_runtime.openai.writers import Writers


def test_a_large_answer_comes_whole(run):
    async def main():
        assert await Writers().joined("a", lambda: (b"%d," % n for n in range(1000)), large=True) == b"".join(
            b"%d," % n for n in range(1000)
        )

    run(main())


def test_an_answer_that_nobody_waits_for_is_not_written_to_its_end(run):
    async def main():
        begun, ended = threading.Event(), threading.Event()

        def endless():
            try:
                while True:
                    begun.set()
                    yield b"more"
            finally:
                ended.set()

        writers = Writers()
        task = asyncio.create_task(writers.joined("a", endless, large=True))
        assert await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        with suppress(asyncio.CancelledError, Cancelled):
            await task
        assert await asyncio.to_thread(ended.wait, 60)

    run(main())


@pytest.mark.parametrize("hogs", [1, 5])
def test_a_client_with_one_answer_does_not_wait_for_all_of_another_s(run, hogs):
    async def main():
        gate, begun = threading.Event(), threading.Event()

        def held():
            begun.set()
            assert gate.wait(60)
            yield b"late"

        writers = Writers()
        tasks = [asyncio.create_task(writers.joined("hog", held, large=True)) for _ in range(hogs)]
        assert await asyncio.to_thread(begun.wait, 60)
        try:
            assert await asyncio.wait_for(writers.joined("another", lambda: [b"now"], large=True), 60) == b"now"
        finally:
            gate.set()
        assert await asyncio.gather(*tasks) == [b"late"] * hogs

    run(main())
