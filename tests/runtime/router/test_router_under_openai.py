"""The official client through the API and the router to fake engines."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import openai
import pytest
from serving import looking, served
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers

from isthmus_runtime.openai.app import BODIES, ApiConfig, OpenAiApi, add_openai_routes
from isthmus_runtime.openai.tokenizer import Tokenizer
from isthmus_runtime.request import SamplingOptions
from isthmus_runtime.serving.app import make_app
from isthmus_runtime.serving.in_flight import InFlight


@asynccontextmanager
async def api_over(backend):
    """An API server with one token per byte."""
    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = HfTokenizer(models.BPE(letters, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(
        raw, config={}, eos_token_ids=(), vocab_size=256, chat_template=None, defaults=SamplingOptions()
    )
    app = make_app("test", bodies=BODIES)
    in_flight = InFlight()
    add_openai_routes(app, OpenAiApi(backend, tokenizer, ApiConfig(served_names=("m",)), in_flight=in_flight))
    async with (
        served(app, in_flight=in_flight) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0, timeout=20) as client,
    ):
        client.ids = tokenizer.encode
        client.in_flight = in_flight
        yield client


def test_stream_through_both(rig, run, kit):
    async def main():
        prefill, decode = kit.Engine("prefill"), kit.Engine("decode")
        async with rig(prefill, decode) as r, api_over(r.backend) as client:
            a, b = client.ids("ab")
            decode.script = [kit.tokens(a), kit.done(b)]
            stream = await client.completions.create(model="m", prompt="hello", stream=True)
            assert "".join([c.choices[0].text async for c in stream]) == "ab"
            assert list(decode.generates[0].request.prompt_token_ids) == client.ids("hello")
            assert decode.generates[0].request == prefill.prefills[0].request  # one seed for both

    run(main())


def test_client_that_leaves_frees_both_engines(rig, run, kit):
    async def main():
        never = asyncio.Event()
        prefill, decode = kit.Engine("prefill"), kit.Engine("decode")
        prefill.prefill_script = [never]
        async with rig(prefill, decode) as r, api_over(r.backend) as client:
            work = asyncio.create_task(client.completions.create(model="m", prompt="hello"))
            await prefill.started.wait()
            work.cancel()
            await decode.until(lambda d: d.cancelled == 1)
            await prefill.until(lambda p: p.cancelled == 1 and p.aborts)
            await client.in_flight.wait_idle()
            assert r.idle()
            await asyncio.gather(work, return_exceptions=True)

    run(main())


def test_a_client_that_closes_its_side_after_the_request_is_answered(rig, run, kit):
    """As `nc -N` does, and proxies of TCP."""

    async def main():
        go_on = asyncio.Event()
        prefill, decode = kit.Engine("prefill"), kit.Engine("decode")
        async with rig(prefill, decode) as r, api_over(r.backend) as client:
            a, b = client.ids("ab")
            decode.script = [kit.tokens(a), go_on, kit.done(b)]
            body = b'{"model": "m", "prompt": "hello"}'
            reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            await decode.started.wait()
            with looking() as looked:
                writer.write_eof()
                await asyncio.wait_for(looked.wait(), 20)
            go_on.set()
            interim, head, answer = (await reader.read()).split(b"\r\n\r\n")
            writer.close()
            assert interim == b"HTTP/1.1 100 Continue" and head.startswith(b"HTTP/1.1 200 ")
            assert json.loads(answer)["choices"][0]["text"] == "ab" and decode.cancelled == 0

    run(main())


def test_a_request_that_is_still_read_is_not_in_flight(rig, run, kit):
    async def main():
        engine, never = kit.Engine("unified"), asyncio.Event()
        engine.local_script = [never]
        async with rig(engine) as r, api_over(r.backend) as client:
            body = b'{"model":"m","prompt":"hello"}'
            _, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
            writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body[:5])
            while not len(client.in_flight):  # noqa: ASYNC110  nothing tells that a request is being read
                await asyncio.sleep(0)
            assert r.metric("isthmus_router_requests_in_flight") == 0
            writer.write(body[5:])
            await engine.started.wait()
            assert r.metric("isthmus_router_requests_in_flight") == 1
            writer.close()
            await client.in_flight.wait_idle()
            assert r.metric("isthmus_router_requests_in_flight") == 0

    run(main())


def test_engine_that_dies_is_an_error_event(rig, run, kit):
    async def main():
        engine = kit.Engine("unified")
        async with rig(engine) as r, api_over(r.backend) as client:
            engine.local_script = [kit.tokens(client.ids("a")[0]), kit.DIE]
            stream = await client.completions.create(model="m", prompt="hello", stream=True)
            with pytest.raises(openai.APIError, match="was lost"):
                async for chunk in stream:
                    assert chunk.choices[0].text == "a"

    run(main())


def test_no_engine_is_503(rig, run, kit):
    async def main():
        engine = kit.Engine("unified")
        engine.is_ready = False
        async with rig(engine, wait=False) as r, api_over(r.backend) as client:
            with pytest.raises(openai.InternalServerError, match="not ready") as caught:
                await client.completions.create(model="m", prompt="hello")
            assert caught.value.status_code == 503 and caught.value.response.headers["Retry-After"] == "1"

    run(main())
