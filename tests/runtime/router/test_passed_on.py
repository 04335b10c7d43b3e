"""Prompts that go to engines as text: to whom they may, and that nobody can tell by the answer."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import threading
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import aiohttp
import pytest
from engine_stack import engine as running_engine
from prometheus_client import CollectorRegistry
from serving import served
from small_bpe import byte_level_bpe

from isthmus_runtime.config import ModelConfig, RouterConfig, ServerConfig
from isthmus_runtime.engine.meters import EngineMeters
from isthmus_runtime.engine.server import BODIES as ENGINE_BODIES
from isthmus_runtime.engine.server import EngineServer
from isthmus_runtime.errors import EngineFailed, InvalidRequest
from isthmus_runtime.executor.fake import VOCAB_SIZE, FakeExecutor
from isthmus_runtime.metrics import RequestMetrics, render
from isthmus_runtime.openai.app import BODIES, ApiConfig, OpenAiApi, add_openai_routes
from isthmus_runtime.openai.text_prompts import ids_of_passed_on
from isthmus_runtime.openai.tokenizer import Tokenizer
from isthmus_runtime.protocol.info import EngineInfo, KvInfo, TransferInfo
from isthmus_runtime.protocol.request import CLIENT_HEADER
from isthmus_runtime.request import GenerateRequest, PromptText, SamplingOptions, SamplingParams
from isthmus_runtime.router.app import Router
from isthmus_runtime.router.passed_on import OwnTokenizer
from isthmus_runtime.serving.app import make_app
from isthmus_runtime.serving.in_flight import InFlight
from isthmus_runtime.sharing.threads_in_turns import ThreadsInTurns

OWN = OwnTokenizer("d1", lambda prompt: [len(prompt.text), 9])
"""Two ids of any text."""


def text_request(text="some words", room=100, max_tokens=200):
    prompt = PromptText(text=text, special=True, room=room)
    return GenerateRequest(request_id="r1", sampling=SamplingParams(max_tokens=max_tokens), prompt=prompt)


def unified(kit, tokenizer="d1", told=5):
    found = kit.Engine("unified", mode="none")
    found.tokenizer, found.vocabulary = tokenizer, "d1"
    found.local_script = [kit.tokens(7, note="local", prompt_tokens=told), kit.done(8)]
    return found


@pytest.mark.parametrize(
    ("engines", "policy", "taken"),
    [
        (("d1",), "round-robin", True),
        (("d1", "d1"), "least-load", True),
        (("d1", "d1"), "prefix-aware", False),
        (("d1", "d1"), "kv-aware", False),
        (("d1", ""), "round-robin", False),
        (("d1", "d2"), "round-robin", False),
        (("",), "round-robin", False),
    ],
)
def test_text_is_taken_where_nobody_needs_ids_before_an_engine_makes_the_same(rig, run, kit, engines, policy, taken):
    async def main():
        async with rig(*(unified(kit, one) for one in engines), tokenizer=OWN, policy=policy) as r:
            assert r.backend.takes_text() == taken
        async with rig(*(unified(kit, one) for one in engines), policy=policy) as r:
            assert not r.backend.takes_text()  # a router that has no tokenizer of its own

    run(main())


def test_prefill_and_decode_see_ids(rig, run, kit):
    async def main():
        prefill, decode = kit.Engine("prefill"), kit.Engine("decode")
        prefill.tokenizer = decode.tokenizer = "d1"
        async with rig(prefill, decode, tokenizer=OWN, policy="round-robin") as r:
            assert not r.backend.takes_text()

    run(main())


def test_the_engine_gets_the_text_and_tells_its_tokens(rig, run, kit):
    async def main():
        async with rig(engine := unified(kit), tokenizer=OWN) as r:
            chunks = await kit.collect(r.backend, text_request())
            (call,) = engine.generates
            assert call.request.to_request() == text_request()
            assert chunks[0].prompt_tokens == 5
            assert r.metric("vllm:prefix_cache_queries_total") == 5
            assert r.idle()

    run(main())


def test_an_old_engine_that_joins_after_planning_gets_ids(rig, run, kit):
    async def main():
        async with rig(old := unified(kit, ""), tokenizer=OWN) as r:
            old.local_script = [kit.tokens(7, note="local"), kit.done(8)]
            chunks = await kit.collect(r.backend, text_request())
            (call,) = old.generates
            assert call.request.prompt is None and call.request.prompt_token_ids == (10, 9)
            assert call.request.sampling.max_tokens == 98
            assert chunks[0].prompt_tokens == 2
            assert r.idle()

    run(main())


@pytest.mark.parametrize("named", ["prompt", "request.prompt"])
def test_an_engine_that_does_not_understand_gets_ids(rig, run, kit, named):
    """As one of an older version does that runs where a newer one was since it was last asked."""

    async def main():
        async with rig(engine := unified(kit), tokenizer=OWN) as r:
            refusal = InvalidRequest("as its library words it", param=named)
            play, engine.before = engine._play, [refusal]

            async def once(request, response, script):
                await play(request, response, script if len(engine.generates) == 1 else [])

            async def plain(request, response, script):
                await (once if script is engine.before else play)(request, response, script)

            engine._play = plain
            chunks = await kit.collect(r.backend, text_request())
            assert [call.request.prompt is None for call in engine.generates] == [False, True]
            assert chunks[0].prompt_tokens == 2
            assert r.idle()

    run(main())


def test_what_is_wrong_with_a_request_is_told_after_both_ways(rig, run, kit):
    async def main():
        async with rig(engine := unified(kit), tokenizer=OWN) as r:
            engine.before = [InvalidRequest("no", param="prompt")]
            with pytest.raises(InvalidRequest, match="no"):
                await kit.collect(r.backend, text_request())
            assert len(engine.generates) == 2 and r.idle()

    run(main())


def test_an_engine_that_does_not_tell_the_tokens_has_failed(rig, run, kit):
    async def main():
        async with rig(unified(kit, told=0), tokenizer=OWN) as r:
            with pytest.raises(EngineFailed, match="how many tokens"):
                await kit.collect(r.backend, text_request())
            assert r.idle()

    run(main())


# ------------------------------------------------------------------------------------------------- whole ways, compared

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = [
    "two",
    " seas",
    " narrow strip",
    "é",
    "e\u0301",
    "日本語",
    "🙂",
    "\n",
    "  ",
    "<|im_end|>",
    "<|im_",
    "\U0001d160",
    "7",
]
MODEL_LEN = 128
BLOCKS = 1 << 14
"""So many that nothing is lost from prefix caches: what is lost depends on when a request ends that its client left."""


@pytest.fixture(scope="module")
def tokenizer():
    raw = byte_level_bpe(
        ["two seas and a narrow strip of land"] * 3, special=["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    )
    raw.add_tokens([f"word{i} " for i in range(VOCAB_SIZE - raw.get_vocab_size())])
    return Tokenizer(
        raw,
        config={},
        eos_token_ids=(2,),
        vocab_size=VOCAB_SIZE,
        chat_template=TEMPLATE,
        defaults=SamplingOptions(),
    )


def maybe(r, share, **options):
    """Each of the options with that chance."""
    return {name: make() for name, make in options.items() if r.random() < share}


def some_text(r, most=16):
    return "".join(r.choices(WORDS, k=r.randrange(most)))


def some_request(r):
    """A path and a body, most of which can be answered."""
    path = r.choice(["completions", "completions", "chat/completions", "responses", "messages"])
    stream = r.random() < 0.4
    body = {"model": "m", "stream": stream, **maybe(r, 0.5, temperature=lambda: r.choice([0, 0.7]))}
    if path == "messages":
        body |= {"max_tokens": r.choice([1, 5, 100]), "messages": [{"role": "user", "content": some_text(r) or "x"}]}
        return path, body | maybe(r, 0.3, stop_sequences=lambda: ["word7"])
    if path == "responses":
        return path, body | {"input": some_text(r) or "x"} | maybe(
            r, 0.5, max_output_tokens=lambda: r.choice([1, 9, 200])
        )
    body |= {"seed": r.randrange(100), "ignore_eos": r.random() < 0.5}
    body |= maybe(
        r,
        0.12,
        n=lambda: r.choice([1, 2]),
        min_tokens=lambda: r.choice([2, 120]),
        truncate_prompt_tokens=lambda: r.choice([-1, 3]),
        return_token_ids=lambda: True,
        prompt_logprobs=lambda: 1,
        stop=lambda: ["word7"],
        logit_bias=lambda: {"5": 1.5},
        cache_salt=lambda: "salt",
        include_stop_str_in_output=lambda: True,
    )
    if stream and r.random() < 0.5:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": r.random() < 0.5}
    body |= maybe(r, 0.7, max_tokens=lambda: r.choice([1, 4, 20, 60, MODEL_LEN]))
    if path == "completions":
        text = some_text(r)
        prompt = r.choices([text, [text, "two"], [5, 6, 7], [text]], weights=[8, 1, 1, 1])[0]
        body |= {"prompt": prompt, **maybe(r, 0.1, echo=lambda: True, best_of=lambda: 2)}
        return path, body | maybe(r, 0.2, logprobs=lambda: r.choice([0, 2]))
    messages = [{"role": r.choice(["user", "system"]), "content": some_text(r)} for _ in range(r.randint(1, 2))]
    return path, body | {"messages": messages} | maybe(
        r,
        0.15,
        logprobs=lambda: True,
        add_generation_prompt=lambda: False,
        allow_control_tokens=lambda: True,
        tools=lambda: [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    )


MASKED = re.compile(rb'(?<=[-_"])(?:[0-9a-f]{32}|[0-9a-f]{24})(?=[-"])|(?<="created":)\d+|(?<="created_at": )\d+')
TOLD_ONCE = {"sequence_number", "completion_tokens", "output_tokens", "total_tokens"}
"""Differ by how tokens came together in the chunks of a stream."""


def gathered(stream):
    """A stream without how tokens came together in its chunks: what all events tell under each path of names, text
    joined; the kinds of events in order; and the last event that tells a usage."""
    told, kinds, usage = {}, [], None

    def gather(path, value):
        if isinstance(value, dict):
            for name, inner in value.items():
                gather((*path, name), inner)
        elif isinstance(value, list):
            for inner in value:
                gather((*path, "index", inner.get("index", 0)) if isinstance(inner, dict) else path, inner)
        elif path[-1] in ("text", "content", "delta") and isinstance(value, str):
            told[path] = told.get(path, "") + value
        elif path[-1] not in TOLD_ONCE:
            known = told.setdefault(path, [])
            if "logprobs" in path[:-1] or value not in known:
                known.append(value)

    for line in stream.split(b"\n"):
        if line.startswith(b"event:") and (not kinds or kinds[-1] != line):
            kinds.append(line)
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            gather((event.get("type"),), event)
            usage = event.get("usage") or event.get("response", {}).get("usage") or usage
    return told, kinds, usage, stream.rpartition(b"\ndata: ")[2].startswith(b"[DONE]")


async def answer(session, url, path, body):
    """Status and content without ids and times: bytes, or what a stream tells."""
    async with session.post(f"{url}/v1/{path}", json=body) as got:
        raw = MASKED.sub(b"#", await got.read())
        streamed = got.content_type == "text/event-stream"
        return got.status, gathered(raw.replace(b"#", b"0")) if streamed else raw


@asynccontextmanager
async def unified_engine(tokenizer, passed_on):
    """The address of a real one whose tokens are a function of all that came before, and its registry. `passed_on`
    gets the prompts that it tokenises."""

    def tokenise(prompt):
        passed_on.append(prompt)
        return ids_of_passed_on(tokenizer, prompt)

    blocks = {"block_size": 4, "max_model_len": MODEL_LEN}
    executor = FakeExecutor(BLOCKS, 4)
    with running_engine(executor=executor, num_blocks=BLOCKS, max_model_len=MODEL_LEN) as backend:
        info = EngineInfo(
            role="unified",
            model="m",
            served_names=("m",),
            fingerprint="f",
            kv=KvInfo(
                physical_blocks=BLOCKS, usable_blocks=BLOCKS - 1, bytes_per_block=32, layout_digest="d", **blocks
            ),
            transfer=TransferInfo(epoch="e1"),
            version="0",
            tokenizer=tokenizer.digest,
        )
        meters = EngineMeters(CollectorRegistry(), "m")
        server = EngineServer(
            backend,
            lambda: info,
            meters,
            InFlight(),
            no_progress_timeout_s=30,
            clock=time.monotonic,
            tokenise=tokenise,
        )
        app = make_app("engine", bodies=ENGINE_BODIES)
        server.add_probes(app)
        server.add_internal(app)
        async with served(app) as port:
            yield f"127.0.0.1:{port}", meters.registry


@dataclass
class Way:
    """A router before an engine."""

    url: str
    registry: CollectorRegistry
    engine: str
    engine_registry: CollectorRegistry
    passed_on: list
    """Prompts that the engine has tokenised."""


@asynccontextmanager
async def ways(tokenizer):
    """A client, a router that passes text on, and one that tokenises, each before an engine of its own: what prefix
    caches hold is told by answers."""
    async with AsyncExitStack() as stack:
        found = []
        for own in (OwnTokenizer(tokenizer.digest, partial(ids_of_passed_on, tokenizer)), None):
            passed_on = []
            engine, engine_registry = await stack.enter_async_context(unified_engine(tokenizer, passed_on))
            config = RouterConfig(
                server=ServerConfig(),
                model=ModelConfig(path="m", served_names=("m",)),
                worker=(engine,),
                policy="round-robin",
                discovery_interval_s=0.05,
            )
            registry = CollectorRegistry()
            router = Router(config, registry, InFlight(), tokenizer=own)
            app = make_app("router", bodies=BODIES, lifespan=router.lifespan)
            add_openai_routes(
                app,
                OpenAiApi(
                    router.backend,
                    tokenizer,
                    ApiConfig(served_names=("m",)),
                    in_flight=InFlight(),
                    metrics=RequestMetrics(registry, "m", prefix="isthmus_router_"),
                    takes_text=router.backend.takes_text,
                    seeds=lambda: 7,
                ),
            )
            port = await stack.enter_async_context(served(app))
            found.append(Way(f"http://127.0.0.1:{port}", registry, f"http://{engine}", engine_registry, passed_on))
            while router.backend.ready():
                await router.pool.changed()
        timeout = aiohttp.ClientTimeout(total=30)
        yield await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout)), *found


def counted(registry, name):
    return sum(
        float(line.rpartition(" ")[2]) for line in render(registry).decode().splitlines() if line.startswith(name)
    )


@pytest.mark.parametrize("requests", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_both_ways_give_one_answer(tokenizer, requests):
    """Of whatever is asked, by every endpoint: usage, errors, log-probabilities and metrics included."""
    seed = int(os.environ.get("SEED", "0")) or random.randrange(1, 10**6)
    print("seed", seed)

    async def main():
        r = random.Random(seed)
        statuses = []
        async with ways(tokenizer) as (session, one, other):
            while len(statuses) < requests or (
                # of the many, enough of each kind: seeds differ
                requests > 100 and (len(one.passed_on) <= 60 or statuses.count(400) <= 30)
            ):
                path, body = some_request(r)
                as_text, by_ids = [await answer(session, way.url, path, body) for way in (one, other)]
                assert as_text == by_ids, (path, json.dumps(body))
                statuses.append(as_text[0])
            print("as text", len(one.passed_on), "refused", statuses.count(400))
            for name in ("isthmus_router_prompt_tokens_total", "vllm:prefix_cache_queries_total"):
                assert counted(one.registry, name) == counted(other.registry, name) > 0
            name = "vllm:prompt_tokens_total"
            assert counted(one.engine_registry, name) == counted(other.engine_registry, name) > 0
            assert not other.passed_on
            if requests > 100:
                assert {prompt.special for prompt in one.passed_on} == {True, False}

    asyncio.run(asyncio.wait_for(main(), 280))


def test_a_text_that_may_not_fit_is_tokenised_here(run, tokenizer):
    """Only what surely fits is passed on, so that limits that are told in tokens have one place."""

    async def main():
        async with ways(tokenizer) as (session, way, _):
            for size, sent in ((100, 1), (116, 0), (400, 0)):
                way.passed_on.clear()
                body = {"model": "m", "prompt": "x" * size, "max_tokens": 12}
                status, _ = await answer(session, way.url, "completions", body)
                assert (status, len(way.passed_on)) == (200 if size < MODEL_LEN else 400, sent), size

    run(main())


@pytest.mark.parametrize("text", ["x" * 500, "y" * 30_000], ids=["here", "in a thread"])
def test_the_engine_refuses_what_is_too_long_as_a_router_does(run, tokenizer, text):
    """A peer that is wrong about a text's length."""

    async def main():
        async with ways(tokenizer) as (session, way, _):
            prompt = {"text": text, "special": True, "room": MODEL_LEN}
            body = {"request": {"request_id": "r", "sampling": {"max_tokens": 4}, "prompt": prompt}}
            async with session.post(f"{way.engine}/internal/generate", json=body) as got:
                told = (await got.json())["error"]
                assert got.status == 400 and told["code"] == "context_length_exceeded"
            async with session.post(f"{way.url}/v1/completions", json={"model": "m", "prompt": text}) as got:
                assert (await got.json())["error"] == told

    run(main())


def test_a_text_that_takes_long_ends_in_time(run, tokenizer):
    """On the engine, whose thread goes on; no router is there that would know better."""
    over = threading.Event()

    async def main():
        async with unified_engine(tokenizer, Slow(over)) as (address, _), aiohttp.ClientSession() as session:
            prompt = {"text": "x" * 20_001, "special": True, "room": MODEL_LEN}
            asked = {"request_id": "r", "sampling": {"max_tokens": 4}, "prompt": prompt, "timeout_s": 0.1}
            try:
                async with session.post(f"http://{address}/internal/generate", json={"request": asked}) as got:
                    assert got.status == 504 and (await got.json())["error"]["code"] == "deadline_exceeded"
            finally:
                over.set()

    run(main())


def test_an_engine_knows_whose_a_text_is(run, tokenizer, monkeypatch):
    """By what its router says, and where that says nothing by the salt."""
    asked, do = [], ThreadsInTurns.do

    async def noted(self, who, make, what):
        asked.append(who)
        return await do(self, who, make, what)

    monkeypatch.setattr(ThreadsInTurns, "do", noted)

    async def main():
        async with unified_engine(tokenizer, []) as (address, _), aiohttp.ClientSession() as session:
            prompt = {"text": "x" * 20_001, "special": True, "room": MODEL_LEN}
            wanted = {"request_id": "r", "sampling": {"max_tokens": 4}, "prompt": prompt, "cache_salt": "salt"}
            for headers in ({}, {CLIENT_HEADER: "c" * 100}):
                url = f"http://{address}/internal/generate"
                async with session.post(url, json={"request": wanted}, headers=headers) as got:
                    assert got.status == 400
        assert asked == ["salt", "c" * 64]

    run(main())


class Slow(list):
    """Takes nothing in until it may."""

    def __init__(self, over):
        super().__init__()
        self.over = over

    def append(self, prompt):
        assert self.over.wait(30)


@asynccontextmanager
async def without_tokenizer():
    with running_engine() as backend:
        meters = EngineMeters(CollectorRegistry(), "m")
        server = EngineServer(backend, lambda: None, meters, InFlight(), no_progress_timeout_s=30, clock=time.monotonic)
        app = make_app("engine", bodies=ENGINE_BODIES)
        server.add_internal(app)
        async with served(app) as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            yield session


@pytest.mark.parametrize("path", ["generate", "prefill"])
def test_an_engine_without_a_tokenizer_refuses_text(run, path):
    async def main():
        async with without_tokenizer() as session, asyncio.timeout(20):
            prompt = {"text": "x", "special": True, "room": 9}
            body = {"request": {"request_id": "r", "sampling": {"max_tokens": 4}, "prompt": prompt}}
            if path == "prefill":
                body |= {"attempt": "a", "ticket": {"mode": "direct", "attempt": "a", "layout_digest": "d"}}
            async with session.post(f"/internal/{path}", json=body) as got:
                assert got.status == 400
                assert "prompt_token_ids" in (await got.json())["error"]["message"]

    run(main())
