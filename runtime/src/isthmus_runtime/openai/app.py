"""The OpenAI routes: a request is checked, tokenised once, and handed to a Backend."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel

from ..config import ChatConfig
from ..errors import ConfigError
from ..interfaces.backend import Backend
from ..metrics import RequestMetrics, TenantMetrics
from ..request import AdapterName
from ..serving.app import errors, json_body
from ..serving.call import Call, add_call_route
from ..serving.in_flight import InFlight
from ..serving.memory import MemoryGuard
from ..structured.checker import Checker
from ..tracing.span import NO_TRACER, Tracer
from . import anthropic
from .anthropic import AnthropicMessage, CountRequest, MessagesRequest, TokenCount
from .batches import Batch
from .embeddings import Embeddings, EmbeddingsRequest, VectorRequests, plan_embeddings
from .keys import Keys
from .lifecycle import Lifecycle
from .plan import Planner
from .planning import Planning
from .ranking import Ranker, Ranking, RerankRequest, ScoreRequest, Scores
from .reference import Chat, Completion, Model, ModelList
from .responses import Response, ResponsesRequest
from .schema import ChatRequest, CompletionRequest
from .tenants_file import TenantsFile
from .tokenizer import Tokenizer
from .tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest, detokenized, tokenized, written
from .works import Works

_COMPUTED_BYTES, _COMPUTED_BYTES_OF_A_TOKEN = 1 << 20, 16
"""Most of a body whose tokens are counted or told, or as many for each token of the model's context. Text that is made
to be slow takes seconds a megabyte."""
BODIES: tuple[type[BaseModel], ...] = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountRequest,
    EmbeddingsRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
"""What `make_app` has to know for the document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiConfig:
    """Settings of the API layer."""

    served_names: tuple[str, ...]
    """Values of `model` that are accepted."""
    chat: ChatConfig = field(default_factory=ChatConfig)
    request_timeout_s: float = 600.0
    api_key: str = ""
    """What clients must send as bearer token; empty: nothing is asked."""
    tenants: TenantsFile | None = None
    """Instead of one key: those of tenants, each with limits of its own."""


def read_api_key(path: str) -> str:
    """The key in a mounted file, without surrounding white space; "" for no path. ConfigError names the file."""
    if not path:
        return ""
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--api-key-file {path}: {e}") from e
    if not key:
        raise ConfigError(f"--api-key-file {path} is empty; put the key clients must send into it")
    return key


def add_openai_routes(app: FastAPI, api: OpenAiApi) -> None:
    """Add the routes under /v1/, and /tokenize and its like, to `app`."""
    routes: list[tuple[str, Callable[[Call], Awaitable[None]], type[BaseModel], type[BaseModel], dict[str, Any]]]
    streamed = {"text/event-stream": {"schema": {"type": "string"}}}
    named: dict[str, Any] = {"text/event-stream": {"schema": {}}}  # of events with names
    routes = [
        ("/v1/chat/completions", api.chat, ChatRequest, Chat, streamed),
        ("/v1/completions", api.completions, CompletionRequest, Completion, streamed),
        ("/v1/responses", api.responses, ResponsesRequest, Response, named),
        ("/v1/messages", api.messages, MessagesRequest, AnthropicMessage, named),
        ("/v1/messages/count_tokens", api.count_tokens, CountRequest, TokenCount, {}),
        ("/v1/embeddings", api.embeddings, EmbeddingsRequest, Embeddings, {}),
        *((path, api.rerank, RerankRequest, Ranking, {}) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
        *((path, api.score, ScoreRequest, Scores, {}) for path in ("/v1/score", "/score")),
        ("/tokenize", api.tokenize, TokenizeRequest, Tokenized, {}),
        ("/detokenize", api.detokenize, DetokenizeRequest, Detokenized, {}),
    ]
    for path, endpoint, body, answer, content in routes:
        add_call_route(
            app,
            path,
            endpoint,
            "POST",
            tags=["openai"],
            openapi_extra=json_body(body),
            responses={**errors(401, 404, 429, 499, 502, 504), 200: {"model": answer, "content": content}},
        )
    app.add_api_route("/v1/models", api.models, tags=["openai"], responses=errors(401))
    app.add_api_route("/v1/models/{name:path}", api.model, tags=["openai"], responses=errors(401, 404))


class OpenAiApi:
    """What the routes do."""

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        config: ApiConfig,
        *,
        in_flight: InFlight,
        metrics: RequestMetrics | None = None,
        tenant_metrics: TenantMetrics | None = None,
        grammars: Checker | None = None,
        tracer: Tracer = NO_TRACER,
        memory: MemoryGuard | None = None,
        adapters: Callable[[], Mapping[str, AdapterName]] = dict,
        takes_text: Callable[[], bool] = lambda: False,
        seeds: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`memory` None: it is not watched. `adapters` that may be named as the model, at present. `takes_text`:
        whether the backend would have prompts as text, at present. `grammars` None: requests for structured output are
        refused. `seeds` gives the seed of a request that names none: drawn here, so that prefill, decode and a
        recompute agree."""
        memory = MemoryGuard() if memory is None else memory
        self._backend = backend
        self._config = config
        self._adapters = adapters
        self._started = int(wall_clock())
        self._planner = Planner(
            backend,
            tokenizer,
            config.served_names,
            chat=config.chat,
            timeout_s=config.request_timeout_s,
            seeds=seeds or _seed_source(),
            wall_clock=wall_clock,
            adapters=adapters,
            takes_text=takes_text,
        )
        self._vectors = VectorRequests(self._planner, config.request_timeout_s)
        self._ranker = Ranker(self._planner, self._vectors, tokenizer, lambda: backend.task, config.request_timeout_s)
        self._tokenizer = tokenizer
        self._keys = Keys(config.api_key, config.tenants, clock)
        planning = Planning(memory)
        tokenizer.long_texts.memory = memory
        self._requests = Lifecycle(
            self._keys,
            config.tenants,
            timeout_s=config.request_timeout_s,
            in_flight=in_flight,
            metrics=metrics,
            tenant_metrics=tenant_metrics,
            tracer=tracer,
            planning=planning,
            clock=clock,
        )
        self._works = Works(
            backend,
            self._requests,
            planning,
            model=config.served_names[0],
            tenants=config.tenants,
            metrics=metrics,
            tenant_metrics=tenant_metrics,
            grammars=grammars,
            memory=memory,
            clock=clock,
        )

    async def models(self, request: Request) -> ModelList:
        """The names that are served, and after them the adapters."""
        self._keys.check(request)
        return ModelList(data=[self._model(n) for n in (*self._config.served_names, *sorted(self._adapters()))])

    async def model(self, request: Request, name: str) -> Model:
        """One of them."""
        self._keys.check(request)
        self._planner.check_model(name)
        return self._model(name)

    async def completions(self, call: Call) -> None:
        """Continue a prompt. With `stream` the answer is a stream of server-sent events."""
        await self._requests.answer(call, self._works.generate, self._planner.completion, operation="text_completion")

    async def chat(self, call: Call) -> None:
        """Answer a conversation. With `stream` the answer is a stream of server-sent events."""
        await self._requests.answer(call, self._works.generate, self._planner.chat)

    async def responses(self, call: Call) -> None:
        """Answer in OpenAI's newer form. Nothing is kept: the input holds all that came before."""
        await self._requests.answer(call, self._works.generate, self._planner.responses)

    async def messages(self, call: Call) -> None:
        """Answer in Anthropic's form, errors included."""
        await self._requests.answer(call, self._works.generate, self._planner.messages, describe=anthropic.error_body)

    async def embeddings(self, call: Call) -> None:
        """A vector for each input, from a model that is served to embed."""

        def plan(body: bytes) -> Batch:
            return plan_embeddings(body, self._planner, self._vectors, lambda: self._backend.task)

        await self._requests.answer(call, self._works.batch, plan, operation="embeddings")

    async def rerank(self, call: Call) -> None:
        """Documents by how well they answer a query, the best first."""
        await self._requests.answer(call, self._works.batch, self._ranker.rerank, operation="rerank")

    async def score(self, call: Call) -> None:
        """How well texts go together."""
        await self._requests.answer(call, self._works.batch, self._ranker.score, operation="score")

    async def count_tokens(self, call: Call) -> None:
        """How many tokens a request to /v1/messages has."""

        def count(body: bytes) -> bytes:
            return written(TokenCount(input_tokens=self._planner.count(body)))

        await self._requests.compute(call, count, self._most_computed(), anthropic.error_body)

    async def tokenize(self, call: Call) -> None:
        """Ids of a text, or of a conversation."""

        def make(body: bytes) -> bytes:
            return written(tokenized(body, self._planner, self._tokenizer, self._limit()))

        await self._requests.compute(call, make, self._most_computed())

    async def detokenize(self, call: Call) -> None:
        """The text of ids."""

        def make(body: bytes) -> bytes:
            return written(detokenized(body, self._planner, self._tokenizer))

        await self._requests.compute(call, make, self._most_computed())

    def _model(self, name: str) -> Model:
        names = self._config.served_names
        parent = None if name in names else names[0]
        return Model(id=name, created=self._started, parent=parent, max_model_len=self._limit())

    def _most_computed(self) -> int:
        """Bytes of a body of which no generation is asked."""
        return max(_COMPUTED_BYTES, _COMPUTED_BYTES_OF_A_TOKEN * (self._limit() or 0))

    def _limit(self) -> int | None:
        return self._backend.max_model_len or self._tokenizer.model_limit or None


def _seed_source() -> Callable[[], int]:
    source = random.Random()
    return lambda: source.getrandbits(63)
