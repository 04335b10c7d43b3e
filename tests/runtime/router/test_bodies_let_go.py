"""What engines are sent of a long prompt is not held while they compute: each choice of a request has its own."""

from __future__ import annotations

import asyncio
import gc
import re
import tracemalloc
from dataclasses import replace

import pytest
from aiohttp import web

from isthmus_runtime.protocol.calls import PrefillAnswer
from isthmus_runtime.protocol.lines import reserved_line, token_line
from isthmus_runtime.protocol.request import request_json
from isthmus_runtime.protocol.ticket import Ticket
from isthmus_runtime.request import FinishReason, TokenChunk

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
    size = len(request_json(kit.request(PROMPT)))

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
