"""The OpenAI routes: a request is checked, tokenised once, and handed to a Backend."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel

from ..config import ChatConfig
from ..errors import ConfigError, InvalidRequest
from ..interfaces.backend import Backend
from ..loop_share import LoopShare
from ..metrics import RequestMetrics, TenantMetrics
from ..request import AdapterName, Structure
from ..serving.app import errors, json_body
from ..serving.call import Call, add_call_route
from ..serving.in_flight import InFlight
from ..serving.memory import MemoryGuard
from ..structured.checker import Checker
from ..tracing.span import NO_TRACER, Span, Tracer, current
from . import anthropic
from .answer import Runner
from .anthropic import AnthropicMessage, CountRequest, MessagesRequest, TokenCount
from .batches import WIDTH, Batch, BatchRunner
from .bodies import json_object
from .chat import NeedsThread
from .embeddings import Embeddings, EmbeddingsRequest, VectorRequests, plan_embeddings
from .job import Job, kept_by, takes_turns
from .keys import Keys
from .lifecycle import Lifecycle, Progress, known_as, whose
from .plan import Plan, Planner
from .ranking import Ranker, Ranking, RerankRequest, ScoreRequest, Scores
from .reference import Chat, Completion, Model, ModelList
from .responses import Response, ResponsesRequest
from .schema import ChatRequest, CompletionRequest, chat_request
from .score_budget import ScoreBudget, echo_budget, kept_budget, token_budget, vector_budget
from .sse import Usage
from .tenants import Tenant
from .tenants_file import TenantsFile
from .tokenizer import Tokenizer
from .tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest, detokenized, tokenized, written
from .writers import Writers

_OFF_LOOP_BYTES = 1 << 12
"""Bodies above this are parsed and tokenised in a thread, so that other streams do not wait: words take 0.2 ms, digits,
which are the slowest, 9."""
_COMPUTED_BYTES, _COMPUTED_BYTES_OF_A_TOKEN = 1 << 20, 16
"""Most of a body whose tokens are counted or told, or as many for each token of the model's context. Text that is made
to be slow takes seconds a megabyte."""
_BRIEF_BATCH_BYTES = 200
"""The same for batches: each text, of which one letter is enough, may be rendered by a template (0.15 ms)."""
_MANY_TOKENS = 1 << 14
"""Of the prompts of a generation, and ids that it allows; fewer are not counted among those that all requests may
have."""
_ID_BYTES = 24
"""Of a token of a prompt: its place among the ids, as JSON as it came, and in the body that an engine gets."""
_MANY_NUMBERS, _MANY_SCORES = 1 << 14, 1 << 10
"""Of the vectors of a request, and log-probabilities of its prompts; fewer are not counted among those of all: whoever
has most of these would keep everybody out."""
_MUCH_ECHO = 1 << 16
"""Bytes that an answer repeats; fewer are not counted among those of all requests."""
_MUCH_KEPT = 1 << 14
"""The same of what is kept of a body."""

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


def add_openai_routes(
    app: FastAPI,
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
    """Add the routes under /v1/, and /tokenize and its like, to `app`.

    `memory` None: it is not watched. `adapters` that may be named as the model, at present. `takes_text`: whether the
    backend would have prompts as text, at present. `grammars` None: requests for structured output are refused.
    `seeds` gives the seed of a request that names none: drawn here, so that prefill, decode and a recompute agree.
    """
    api = _Api(
        backend,
        tokenizer,
        config,
        in_flight=in_flight,
        metrics=metrics,
        tenant_metrics=tenant_metrics,
        grammars=grammars,
        tracer=tracer,
        memory=MemoryGuard() if memory is None else memory,
        adapters=adapters,
        takes_text=takes_text,
        seeds=seeds or _seed_source(),
        clock=clock,
        wall_clock=wall_clock,
    )
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


def _seed_source() -> Callable[[], int]:
    source = random.Random()
    return lambda: source.getrandbits(63)


class _Api:
    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        config: ApiConfig,
        *,
        in_flight: InFlight,
        metrics: RequestMetrics | None,
        tenant_metrics: TenantMetrics | None,
        grammars: Checker | None,
        tracer: Tracer,
        memory: MemoryGuard,
        adapters: Callable[[], Mapping[str, AdapterName]],
        takes_text: Callable[[], bool],
        seeds: Callable[[], int],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._backend = backend
        self._config = config
        self._metrics = metrics
        self._grammars = grammars
        self._adapters = adapters
        self._started = int(wall_clock())
        self._planner = Planner(
            backend,
            tokenizer,
            config.served_names,
            chat=config.chat,
            timeout_s=config.request_timeout_s,
            seeds=seeds,
            wall_clock=wall_clock,
            adapters=adapters,
            takes_text=takes_text,
        )
        writers = Writers()
        self._runner = Runner(backend, writers, metrics, clock)
        self._batches = BatchRunner(backend, writers, metrics, clock)
        self._planning = LoopShare()
        self._vectors = VectorRequests(self._planner, config.request_timeout_s)
        self._ranker = Ranker(self._planner, self._vectors, tokenizer, lambda: backend.task, config.request_timeout_s)
        self._scores = ScoreBudget()
        self._numbers = vector_budget()
        self._tokens = token_budget()
        self._echoes = echo_budget()
        self._kept = kept_budget()
        self._tokenizer = tokenizer
        self._keys = Keys(config.api_key, config.tenants, clock)
        self._tenants = config.tenants
        self._tenant_metrics = tenant_metrics
        self._requests = Lifecycle(
            self._keys,
            config.tenants,
            timeout_s=config.request_timeout_s,
            in_flight=in_flight,
            metrics=metrics,
            tenant_metrics=tenant_metrics,
            tracer=tracer,
            memory=memory,
            clock=clock,
        )
        memory.add_book(self._runner.untold)

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
        await self._requests.answer(call, self._generate, self._planner.completion, operation="text_completion")

    async def chat(self, call: Call) -> None:
        """Answer a conversation. With `stream` the answer is a stream of server-sent events."""
        await self._requests.answer(call, self._generate, self._planner.chat)

    async def responses(self, call: Call) -> None:
        """Answer in OpenAI's newer form. Nothing is kept: the input holds all that came before."""
        await self._requests.answer(call, self._generate, self._planner.responses)

    async def messages(self, call: Call) -> None:
        """Answer in Anthropic's form, errors included."""
        await self._requests.answer(call, self._generate, self._planner.messages, describe=anthropic.error_body)

    async def embeddings(self, call: Call) -> None:
        """A vector for each input, from a model that is served to embed."""

        def plan(body: bytes) -> Batch:
            return plan_embeddings(body, self._planner, self._vectors, lambda: self._backend.task)

        await self._requests.answer(call, self._answer_batch, plan, operation="embeddings")

    async def rerank(self, call: Call) -> None:
        """Documents by how well they answer a query, the best first."""
        await self._requests.answer(call, self._answer_batch, self._ranker.rerank, operation="rerank")

    async def score(self, call: Call) -> None:
        """How well texts go together."""
        await self._requests.answer(call, self._answer_batch, self._ranker.score, operation="score")

    async def count_tokens(self, call: Call) -> None:
        """How many tokens a request to /v1/messages has."""

        def count(body: bytes) -> bytes:
            data = anthropic.as_chat(json_object(body), counting=True)
            return written(TokenCount(input_tokens=len(self._planner.tokens(chat_request(data), special=True))))

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

    # ------------------------------------------------------------------------------------------------- one request

    async def _generate(self, call: Call, plan: Plan, progress: Progress) -> None:
        progress.stage = "reading"
        body = await call.read()
        progress.stage = "planning"
        span = current()
        tokenise = span.child("tokenise")
        try:
            job = await self._plan(call, plan, body, progress.tenant)
        finally:
            tokenise.end()
        if span.recording:
            _describe_job(span, job, self._config.served_names[0])
        del body  # megabytes, which an answer would keep as long as it streams
        who = whose(call, progress.tenant)
        tokens = sum(len(request.prompt_token_ids) for request in job.requests[:: job.n])
        echoed = sum(echo.bytes_held for echo in job.echoes)
        kept = kept_by(job)
        call.drop(kept + tokens * _ID_BYTES + echoed, who)
        with (
            self._kept.holding(kept if kept > _MUCH_KEPT else 0, who),
            self._echoes.holding(echoed if echoed > _MUCH_ECHO else 0, who),
        ):
            await self._run_planned(call, job, progress, who, tokens)

    async def _run_planned(self, call: Call, job: Job, progress: Progress, client: str, tokens: int) -> None:
        job.client = client
        if job.stream or takes_turns(job):
            job.requests = tuple(replace(request, client=known_as(client)) for request in job.requests)
            if job.structure is not None:
                await self._check_structure(job.structure, job.structure_param, client)
        progress.stage, progress.answer_id, progress.format = "generation", job.answer_id, job.format
        tokens += len(job.requests[0].sampling.allowed_token_ids)  # of all choices, which share them
        counted = tokens if tokens > _MANY_TOKENS else 0
        scores = job.scores if job.scores > _MANY_SCORES else 0
        with self._scores.holding(scores, client) as job.told, self._tokens.holding(counted, client):
            if progress.tenant is None:
                await self._run(job, progress.arrived, call)
            else:
                await self._run_of(progress.tenant, job, progress.arrived, call)

    async def _answer_batch(self, call: Call, plan: Callable[[bytes], Batch], progress: Progress) -> None:
        progress.stage = "reading"
        body = await call.read()
        progress.stage = "planning"
        tokenise = current().child("tokenise")
        try:
            if len(body) <= _BRIEF_BATCH_BYTES:
                await self._planning.room(whose(call, progress.tenant))
                with self._planning.spending():
                    batch = plan(body)
            else:
                batch = await self._requests.planned(call, progress.tenant, plan, body)
        finally:
            tokenise.end()
        del body
        who = whose(call, progress.tenant)
        batch = replace(batch, client=who)
        call.drop(batch.prompt_tokens * _ID_BYTES, who)
        progress.stage, progress.answer_id = "generation", batch.answer_id
        numbers = batch.numbers if batch.numbers > _MANY_NUMBERS else 0
        tokens = batch.prompt_tokens if batch.prompt_tokens > _MANY_TOKENS else 0
        with self._numbers.holding(numbers, who), self._tokens.holding(tokens, who):
            await self._run_batch(batch, progress.tenant, progress.arrived, call)

    async def _run_batch(self, batch: Batch, tenant: Tenant | None, arrived: float, call: Call) -> None:
        width = min(WIDTH, len(batch.requests))
        if tenant is None:
            usage = await self._batches.run(batch, width, arrived, call)
        else:
            assert self._tenants is not None
            width = min(width, tenant.concurrency or width)
            with self._tenants.tenants.running(tenant, width):
                usage = await self._batches.run(tenant.own(batch), width, arrived, call)
            if self._tenant_metrics is not None:
                self._tenant_metrics.used(tenant.name, usage.prompt_tokens, usage.completion_tokens)
        if (span := current()).recording:
            span.set({"gen_ai.request.model": self._config.served_names[0], "gen_ai.response.id": batch.answer_id})
            _describe_answer(span, usage)

    async def _run(self, job: Job, arrived: float, call: Call) -> Usage:
        usage = await (self._runner.stream if job.stream else self._runner.whole)(job, arrived, call)
        if (span := current()).recording:
            _describe_answer(span, usage)
        return usage

    async def _run_of(self, tenant: Tenant, job: Job, arrived: float, call: Call) -> None:
        assert self._tenants is not None
        with self._tenants.tenants.running(tenant, len(job.requests)):
            usage = await self._run(tenant.own(job), arrived, call)
        if self._tenant_metrics is not None:
            self._tenant_metrics.used(tenant.name, usage.prompt_tokens, usage.completion_tokens)

    async def _check_structure(self, structure: Structure, param: str, who: str) -> None:
        if self._grammars is None:
            raise InvalidRequest(f"{param}: not available here", param=param)
        await self._grammars.check(structure, param, who)

    async def _plan(self, call: Call, plan: Plan, body: bytes, tenant: Tenant | None) -> Job:
        """A short body is planned here and now, unless that turns out to take long."""
        if len(body) <= _OFF_LOOP_BYTES:
            await self._planning.room(whose(call, tenant))
            try:
                with self._planning.spending():
                    return plan(body, briefly=True)
            except NeedsThread:
                pass
        return await self._requests.planned(call, tenant, plan, body)

    def _model(self, name: str) -> Model:
        names = self._config.served_names
        parent = None if name in names else names[0]
        return Model(id=name, created=self._started, parent=parent, max_model_len=self._limit())

    def _most_computed(self) -> int:
        """Bytes of a body of which no generation is asked."""
        return max(_COMPUTED_BYTES, _COMPUTED_BYTES_OF_A_TOKEN * (self._limit() or 0))

    def _limit(self) -> int | None:
        return self._backend.max_model_len or self._tokenizer.model_limit or None


def _describe_job(span: Span, job: Job, model: str) -> None:
    """What was asked for, by the conventions for generative AI; nothing of the prompt itself."""
    sampling = job.requests[0].sampling
    span.set(
        {
            "gen_ai.provider.name": "isthmus",
            "gen_ai.request.model": model,
            "gen_ai.response.id": job.answer_id,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.choice.count": len(job.requests),
            "gen_ai.request.stream": job.stream,
        }
    )


def _describe_answer(span: Span, usage: Usage) -> None:
    span.set(
        {
            "http.response.status_code": 200,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        }
    )
