"""What engines are sent of a long prompt is not held while they compute, and little of what they say to who reads
nothing: each choice of a request has its own connection."""

from __future__ import annotations

import asyncio
import gc
import re
import tracemalloc
import weakref
from contextlib import suppress
from dataclasses import replace

import pytest
from aiohttp import web

from isthmus_runtime.errors import Overloaded, RequestError
from isthmus_runtime.protocol.calls import PrefillAnswer
from isthmus_runtime.protocol.lines import reserved_line, token_line
from isthmus_runtime.protocol.request import request_parts
from isthmus_runtime.protocol.ticket import Ticket
from isthmus_runtime.request import FinishReason, SamplingParams, TokenChunk, TokenLogprobs
from isthmus_runtime.router.attempt import Attempt
from isthmus_runtime.router.wire import Exchange

CHOICES = 6
PROMPT = (7,) * 300_000
FIRST, LAST = TokenChunk((7,), note="local"), TokenChunk((8,), finish_reason=FinishReason.STOP)


def deaf(kit, role, speaks, ends):
    """An engine that keeps nothing of what it is sent. `speaks`, `ends`: events before its first and its last token."""

    class Deaf(kit.Engine):
        asked = 0

        async def _generate(self, request):
            body = await request.read()
            found = re.search(rb'"attempt":"(\w+)"', body[-300:])
            del body
            request._read_bytes = None
            self.asked += 1
            self.note()
            response = web.StreamResponse()
            if found is not None:
                attempt = found[1].decode()
                commit = self._commit_of[attempt] = asyncio.get_running_loop().create_future()
                await response.prepare(request)
                await response.write(reserved_line(Ticket(mode="memory", attempt=attempt, layout_digest="d")))
                await commit
            await speaks.wait()
            if found is None:
                await response.prepare(request)
            await response.write(token_line(FIRST))
            await ends.wait()
            await response.write(token_line(LAST))
            await response.write_eof()
            return response

        async def _prefill(self, request):
            body = await request.read()
            attempt = re.search(rb'"attempt":"(\w+)"', body[-900:])[1].decode()
            del body
            request._read_bytes = None
            answer = PrefillAnswer(attempt=attempt, num_tokens=len(PROMPT))
            return web.Response(text=answer.model_dump_json(exclude_defaults=True), content_type="application/json")

    engine = Deaf(role)
    engine.max_model_len = 1 << 20
    return engine


@pytest.mark.parametrize("roles", [("unified",), ("prefill", "decode")])
def test_what_was_sent_is_let_go_of_before_the_first_token_and_after_it(rig, run, kit, roles) -> None:
    size = sum(map(len, request_parts(kit.request(PROMPT))))

    async def main() -> None:
        speaks, ends = asyncio.Event(), asyncio.Event()
        engines = [deaf(kit, role, speaks, ends) for role in roles]
        decode = engines[-1]
        async with rig(*engines) as r:
            begun = 0

            async def ask(number: int) -> None:
                nonlocal begun

                def take(chunk: TokenChunk) -> bool:
                    nonlocal begun
                    begun += chunk.finish_reason is None
                    decode.note()
                    return True

                await r.backend.push(replace(kit.request(PROMPT, request_id=f"r{number}"), timeout_s=25.0), take)

            def held() -> int:
                gc.collect()
                return tracemalloc.get_traced_memory()[0] - before

            tracemalloc.start(1)
            try:
                before = tracemalloc.get_traced_memory()[0]
                asks = [asyncio.ensure_future(ask(number)) for number in range(CHOICES)]
                await decode.until(lambda e: e.asked == CHOICES)
                if roles == ("unified",):
                    assert held() < size, "while the first token is waited for"
                speaks.set()
                await decode.until(lambda e: begun == CHOICES)
                assert held() < size, "while the others come"
            finally:
                tracemalloc.stop()
            ends.set()
            await asyncio.gather(*asks)

    run(main())


def test_what_nobody_reads_is_little_and_goes_with_the_connection(rig, run, kit) -> None:
    top = tuple((i, -1.0) for i in range(20))
    line = TokenChunk((5,) * 4, (TokenLogprobs(5, -0.5, top),) * 4)

    async def main() -> None:
        engine, gate, never, read = kit.Engine("unified"), asyncio.Event(), asyncio.Event(), asyncio.Event()
        engine.local_script = [line] * 20_000 + [gate]

        async def wait() -> bool:
            read.set()
            return await never.wait()

        async with rig(engine) as r:
            asked = replace(kit.request(), sampling=SamplingParams(max_tokens=100_000, logprobs=20))
            task = asyncio.ensure_future(r.backend.push(asked, lambda chunk: wait))
            await read.wait()
            (exchange,) = await until(lambda: [weakref.ref(one) for one in gc.get_objects() if _is_full(one)])
            gc.disable()
            try:
                held = exchange()._held
                task.cancel()
                await asyncio.wait([task])
                del task  # its error has frames that have it
                assert held < 250 << 10
                await until(lambda: exchange() is None)
            finally:
                gc.enable()

    run(main())


@pytest.mark.parametrize("roles", [("unified",), ("prefill", "decode")])
@pytest.mark.parametrize("how", ["refused", "lost", "lost later", "late", "left"])
def test_nothing_of_a_request_that_failed_waits_for_the_collector(rig, run, kit, how, roles) -> None:
    """Its errors have frames that have it, and its prompt may be megabytes: many are refused where engines are full."""

    async def main() -> None:
        engines, never, begun = [kit.Engine(role) for role in roles], asyncio.Event(), asyncio.Event()
        script = {
            "refused": [Overloaded("full", status=429)],
            "lost": [kit.DIE],
            "lost later": [FIRST, kit.DIE],
            "late": [never],
            "left": [FIRST, never],
        }[how]
        for engine in engines:
            engine.before, engine.script, engine.local_script = script[: how == "refused"], script, script
        async with rig(*engines) as r:

            def take(chunk: TokenChunk) -> bool:
                begun.set()
                return True

            async def ask() -> None:
                wanted = kit.request(timeout_s=0.2 if how == "late" else 20.0)
                with suppress(RequestError):
                    await r.backend.push(wanted, take)

            gc.collect()
            gc.disable()
            try:
                task = asyncio.ensure_future(ask())
                if how == "left":
                    await begun.wait()
                    task.cancel()
                await asyncio.wait([task])
                del task
                await until(lambda: not any(type(one) is Attempt for one in gc.get_objects()))
            finally:
                gc.enable()
            never.set()

    run(main())


async def until(found):
    """The test's own deadline bounds this."""
    while True:
        if what := found():
            return what
        await asyncio.sleep(0)


def _is_full(one: object) -> bool:
    # Others may be odd: a class of torch.distributed warns where it is asked for its own.
    return type(one) is Exchange and one._paused
