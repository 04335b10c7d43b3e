"""An engine that computes nothing and answers whatever a router asks: `python upstream.py PORT [--task embed] ...`.

POST /hold, /later and /go: requests wait from now on, before their first token or after it, and go on; /flood: all
tokens that they ask for are given, as fast as they are read. What a router does with a request is measured without an
engine beside it, and what requests hold while they wait.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import struct

import uvloop
from aiohttp import web

from isthmus_runtime.protocol.calls import GenerateCall
from isthmus_runtime.protocol.info import EngineInfo, KvInfo, TransferInfo
from isthmus_runtime.protocol.lines import token_line
from isthmus_runtime.request import FinishReason, ServedTask, TokenChunk, TokenLogprobs

DIMENSIONS = 64
TOKENS = 4
"""Most of an answer."""


def chunks(call: GenerateCall) -> list[TokenChunk]:
    """The whole answer."""
    request = call.request.to_request()
    sampling = request.sampling
    told = dict(prompt_tokens=300 if request.prompt is not None else 0, note="local")
    if request.pooling is not None:
        vector = struct.pack(f"<{DIMENSIONS}f", *([0.125] * DIMENSIONS))
        return [TokenChunk(vector=vector, finish_reason=FinishReason.STOP, **told)]
    likely = (*sampling.allowed_token_ids[:2], *range(100, 200))[: max(sampling.logprobs, 0)]
    top = tuple((token, -1.0 - at) for at, token in enumerate(likely))
    count = min(TOKENS, sampling.max_tokens)
    logprobs = (TokenLogprobs(likely[0] if likely else 100, -1.0, top),) * (count if sampling.logprobs >= 0 else 0)
    more = tuple((token, -1.0) for token in range(100, 100 + max(0, sampling.prompt_logprobs)))
    scored = request.prompt_token_ids[1:] if sampling.prompt_logprobs >= 0 else ()
    scores = tuple(TokenLogprobs(token, -1.0, more, 1) for token in scored)
    answer = TokenChunk(token_ids=(2229,) * count, logprobs=logprobs, prompt_logprobs=scores, **told)
    return [answer._replace(finish_reason=FinishReason.LENGTH)]


_IDS = re.compile(rb'("prompt_token_ids":\[)[\d,]{999,}(?=\d\])')


def _shorter(body: bytes) -> bytes:
    """A body whose long prompt nobody asks about: to read 128 of 200 KB would take longer than what is measured."""
    return body if b'"prompt_logprobs"' in body else _IDS.sub(rb"\1", body)


def make(args: argparse.Namespace) -> web.Application:
    """The application."""
    info = EngineInfo(
        role="unified",
        model="m",
        served_names=("test",),
        fingerprint="f",
        kv=KvInfo(
            block_size=16,
            physical_blocks=1001,
            usable_blocks=1000,
            bytes_per_block=1,
            max_model_len=args.max_model_len,
            layout_digest="d",
        ),
        transfer=TransferInfo(),
        version="0",
        task=ServedTask(kind=args.task, dimensions=DIMENSIONS if args.task == "embed" else 0),
        tokenizer=args.tokenizer,
    ).model_dump_json()
    going, begins = asyncio.Event(), asyncio.Event()
    going.set()
    begins.set()
    floods = asyncio.Event()
    count = 0

    async def tell(request: web.Request) -> web.Response:
        return web.Response(text=info, content_type="application/json")

    async def generate(request: web.Request) -> web.StreamResponse:
        nonlocal count
        call = GenerateCall.model_validate_json(_shorter(await request.read()))
        response = web.StreamResponse()
        await response.prepare(request)
        count += 1
        try:
            await begins.wait()
            whole = chunks(call)
            if not going.is_set() and not whole[0].vector:
                await response.write(token_line(whole[0]._replace(finish_reason=None)))
                whole = [TokenChunk(finish_reason=FinishReason.LENGTH)]
            if floods.is_set():
                line = token_line(whole[0]._replace(finish_reason=None))
                for _ in range(call.request.sampling.max_tokens // TOKENS):
                    await response.write(line)
            await going.wait()
        finally:
            count -= 1
        for chunk in whole:
            await response.write(token_line(chunk))
        await response.write_eof()
        return response

    async def set_hold(request: web.Request) -> web.Response:
        for event, is_set in (
            (going, request.path in ("/go", "/flood")),
            (begins, request.path != "/hold"),
            (floods, request.path == "/flood"),
        ):
            event.set() if is_set else event.clear()
        return web.Response(text=str(count))

    app = web.Application(client_max_size=1 << 30)
    app.router.add_get("/info", tell)
    app.router.add_get("/ready", tell)
    app.router.add_post("/internal/generate", generate)
    for path in ("/hold", "/later", "/go", "/flood"):
        app.router.add_post(path, set_hold)
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--task", default="generate")
    parser.add_argument("--tokenizer", default="", help="digest of the one by which it takes texts")
    parser.add_argument("--max-model-len", type=int, default=8192)
    given = parser.parse_args()

    async def main() -> None:
        runner = web.AppRunner(make(given), handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", given.port, reuse_address=True).start()
        await asyncio.Event().wait()

    uvloop.run(main())
