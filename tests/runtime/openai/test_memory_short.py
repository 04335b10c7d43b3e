"""Requests while the memory of the process runs short: what they are counted with, and how they end."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from isthmus_runtime.serving.memory import MemoryGuard
from isthmus_runtime.serving.port import PortState
from isthmus_runtime.serving.pressure import Use

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
            ids = 8 * len(api.backend.requests[0].prompt_token_ids)
            assert len(told) <= connection.held({}).size - ids < len(told) + 1000
            go.set()
            async with await asked as answer:
                assert answer.status == 200
                await answer.read()
            await until(lambda: connection.held({}).size == 0)

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
