"""A small tokenizer, a scripted backend, and the real API app on a free loopback port."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from serving import served
from small_bpe import byte_level_bpe

from isthmus_runtime.config import ChatConfig
from isthmus_runtime.metrics import RequestMetrics, TenantMetrics, render
from isthmus_runtime.openai import works
from isthmus_runtime.openai.app import BODIES, ApiConfig, OpenAiApi, add_openai_routes
from isthmus_runtime.openai.tokenizer import Tokenizer
from isthmus_runtime.request import FinishReason, ServedTask, TokenChunk, TokenLogprobs
from isthmus_runtime.serving.app import add_pages, make_app
from isthmus_runtime.serving.in_flight import InFlight

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Wooden boats cross the narrow strip of land between two seas.",
    "Zwei Meere, eine Landenge: größer als gedacht, schöner als erhofft.",
    "日本語のテキストも少しだけ。 emoji: 🙂🚀 👩‍👩‍👧‍👦",
    "STOP here, then go on; stop there.",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    """A byte-level BPE model directory as `model import` writes it."""
    root = tmp_path_factory.mktemp("model")
    tokenizer = byte_level_bpe(SENTENCES, special=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(root / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    (root / "config.json").write_text(
        json.dumps({"vocab_size": size, "eos_token_id": 2, "max_position_embeddings": 512})
    )
    (root / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    (root / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": "<|im_start|>",
                "eos_token": {"content": "<|im_end|>", "special": True},
                "add_bos_token": False,
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )
    return root


@pytest.fixture(scope="session")
def tokenizer(model_dir) -> Tokenizer:
    return Tokenizer.load(model_dir)


class ScriptedBackend:
    """Answers every request with `script(request)`: token ids, exceptions to raise, and events to wait for."""

    def __init__(self, script) -> None:
        self.script = script
        self.max_model_len = 256
        self.task = ServedTask()
        self.not_ready = ""
        self.requests = []
        self.ended = []
        self.closed = asyncio.Event()
        self.started = asyncio.Event()

    def ready(self) -> str:
        return self.not_ready

    async def generate(self, request):
        self.requests.append(request)
        self.started.set()
        outcome = "closed"
        made = 0
        try:
            for item in self.script(request):
                if isinstance(item, asyncio.Event):
                    await item.wait()
                elif isinstance(item, BaseException):
                    outcome = "raised"
                    raise item
                elif isinstance(item, TokenChunk):
                    if item.finish_reason is not None:
                        outcome = "finished"
                    yield item
                else:
                    made += 1
                    stop = item in request.sampling.stop_token_ids
                    last = stop or made == request.sampling.max_tokens
                    reason = FinishReason.STOP if stop else FinishReason.LENGTH if last else None
                    outcome = "finished" if last else "closed"
                    asked = request.sampling.logprobs
                    top = tuple((item + i, -0.5 - i) for i in range(asked))
                    logprobs = (TokenLogprobs(item, -0.5, top),) if asked >= 0 else ()
                    yield TokenChunk(token_ids=(item,), logprobs=logprobs, finish_reason=reason, cached_tokens=3)
                    if last:
                        return
        finally:
            self.ended.append(outcome)
            self.closed.set()


class Api:
    """A running API: its port, backend and parts."""

    def __init__(self, port, backend, in_flight, registry) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.backend = backend
        self.in_flight = in_flight
        self._registry = registry

    def text(self) -> str:
        """All metrics."""
        return render(self._registry).decode()

    def metric(self, start: str) -> float:
        """The sum of all series whose line begins with `start`."""
        lines = render(self._registry).decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))


@pytest.fixture
def serve(tokenizer):
    """`async with serve(script) as api`: the real app over a ScriptedBackend."""

    @asynccontextmanager
    async def start(
        script,
        *,
        api_key="",
        timeout_s=30.0,
        max_body_bytes=1 << 20,
        used=tokenizer,
        cors_origins=(),
        chat=None,
        tenants=None,
        clock=time.monotonic,
        grammars=None,
        memory=None,
    ):
        backend = ScriptedBackend(script)
        registry = CollectorRegistry()
        in_flight = InFlight()
        app = make_app("test", bodies=BODIES, max_body_bytes=max_body_bytes, cors_origins=cors_origins)
        add_openai_routes(
            app,
            OpenAiApi(
                backend,
                used,
                ApiConfig(
                    served_names=("tiny", "org/tiny"),
                    chat=chat or ChatConfig(),
                    api_key=api_key,
                    request_timeout_s=timeout_s,
                    tenants=tenants,
                ),
                in_flight=in_flight,
                metrics=RequestMetrics(registry, "tiny"),
                tenant_metrics=None if tenants is None else TenantMetrics(registry, "tiny"),
                clock=clock,
                grammars=grammars,
                memory=memory,
            ),
        )
        add_pages(app)
        async with served(app, in_flight=in_flight, memory=memory) as port:
            yield Api(port, backend, in_flight, registry)

    return start


@pytest.fixture
def run():
    """Run a coroutine on a fresh loop with a deadline."""
    return lambda work: asyncio.run(asyncio.wait_for(work, 30))


@pytest.fixture
def budgets(monkeypatch):
    """Those of the server that a test makes."""
    found = works.Budgets()
    monkeypatch.setattr(works, "Budgets", lambda: found)
    return found
