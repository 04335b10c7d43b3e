"""The OpenAI routes: checks, tokenises once, hands over to a Backend, and ends every request exactly once."""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import FastAPI, Request

from ..config import ChatConfig
from ..errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    RequestError,
)
from ..interfaces.backend import Backend
from ..metrics import RequestMetrics
from ..request import Structure
from ..serving.app import errors, json_body
from ..serving.call import Call, Cut, add_call_route, authorization, error_answer
from ..serving.in_flight import InFlight
from ..structured.checker import Checker
from .answer import Job, Runner
from .chat import NeedsThread
from .plan import Plan, Planner
from .reference import Chat, Completion, Model, ModelList
from .schema import ChatRequest, CompletionRequest
from .sse import error_event
from .tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_OFF_LOOP_BYTES = 20_000
"""Bodies above this are parsed and tokenised in a thread, so that other streams do not wait (about 5 ms of work)."""
_DEADLINE_MARGIN_S = 1.0
"""The backend enforces the deadline and knows the reason; we step in when it is stuck, or the client does not read."""
_LAST_WORDS_S = 1.0
"""How long a client that does not read may hold up its own error event."""

BODIES = (ChatRequest, CompletionRequest)
"""What `make_app` has to know for the document."""


class _Unauthorised(InvalidRequest):
    status = 401
    code = "invalid_api_key"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiConfig:
    """Settings of the API layer."""

    served_names: tuple[str, ...]
    """Values of `model` that are accepted."""
    chat: ChatConfig = field(default_factory=ChatConfig)
    request_timeout_s: float = 600.0
    api_key: str = ""
    """What clients must send as bearer token; empty: nothing is asked."""


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
    grammars: Checker | None = None,
    seeds: Callable[[], int] | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> None:
    """Add /v1/chat/completions, /v1/completions and /v1/models to `app`.

    `grammars` None: requests for structured output are refused.
    `seeds` gives the seed of a request that names none: drawn here, so that prefill, decode and a recompute agree.
    """
    api = _Api(
        backend,
        tokenizer,
        config,
        in_flight=in_flight,
        metrics=metrics,
        grammars=grammars,
        seeds=seeds or _seed_source(),
        clock=clock,
        wall_clock=wall_clock,
    )
    for path, endpoint, body, answer in (
        ("/v1/chat/completions", api.chat, ChatRequest, Chat),
        ("/v1/completions", api.completions, CompletionRequest, Completion),
    ):
        stream = {"text/event-stream": {"schema": {"type": "string"}}}
        add_call_route(
            app,
            path,
            endpoint,
            "POST",
            tags=["openai"],
            openapi_extra=json_body(body),
            responses={**errors(401, 404, 429, 499, 502, 504), 200: {"model": answer, "content": stream}},
        )
    app.add_api_route("/v1/models", api.models, tags=["openai"], responses=errors(401))
    app.add_api_route("/v1/models/{name:path}", api.model, tags=["openai"], responses=errors(401, 404))


def _seed_source() -> Callable[[], int]:
    source = random.Random()
    return lambda: source.getrandbits(63)


@dataclass(slots=True)
class _Progress:
    """How far a request has come, for the error that may end it."""

    stage: str = "admission"
    answer_id: str = ""


class _Api:
    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        config: ApiConfig,
        *,
        in_flight: InFlight,
        metrics: RequestMetrics | None,
        grammars: Checker | None,
        seeds: Callable[[], int],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._backend = backend
        self._config = config
        self._in_flight = in_flight
        self._metrics = metrics
        self._grammars = grammars
        self._clock = clock
        self._started = int(wall_clock())
        self._planner = Planner(
            backend,
            tokenizer,
            config.served_names,
            chat=config.chat,
            timeout_s=config.request_timeout_s,
            seeds=seeds,
            wall_clock=wall_clock,
        )
        self._runner = Runner(backend, metrics, clock)
        self._model_limit = tokenizer.model_limit
        self._key = config.api_key.encode()

    async def models(self, request: Request) -> ModelList:
        """The names that are served."""
        self._authorise(request)
        return ModelList(data=[self._model(n) for n in self._config.served_names])

    async def model(self, request: Request, name: str) -> Model:
        """One of them."""
        self._authorise(request)
        self._planner.check_model(name)
        return self._model(name)

    async def completions(self, call: Call) -> None:
        """Continue a prompt. With `stream` the answer is a stream of server-sent events."""
        await self._serve(call, self._planner.completion)

    async def chat(self, call: Call) -> None:
        """Answer a conversation. With `stream` the answer is a stream of server-sent events."""
        await self._serve(call, self._planner.chat)

    # ------------------------------------------------------------------------------------------------- one request

    async def _serve(self, call: Call, plan: Plan) -> None:
        arrived = self._clock()
        progress = _Progress()
        try:
            with self._in_flight.track():
                self._authorise(call)
                await self._answer(call, plan, arrived, progress)
                return
        except RequestError as e:
            error = e
        except asyncio.CancelledError:
            if not self._in_flight.aborting:
                self._count(Cancelled("the client left"))
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()  # ours, from InFlight.abort: the client is still there and gets an answer
            error = self._in_flight.refusal()
        except ConnectionResetError:
            self._count(Cancelled("the client left"))
            return
        except Exception:
            _log.exception("%s failed", call.path)
            error = EngineFailed("internal error; the log of this process has the details")
        self._count(error)
        error = error.located(progress.stage, progress.answer_id or uuid.uuid4().hex)
        if error.attempt and not progress.answer_id:
            _log.info("%s, %s: %s", call.path, error.attempt, error.message)
        if call.begun:
            await self._last_words(call, error)
        else:
            await call.reply(*error_answer(error))

    async def _answer(self, call: Call, plan: Plan, arrived: float, progress: _Progress) -> None:
        limit = self._config.request_timeout_s
        try:
            async with asyncio.timeout(limit + _DEADLINE_MARGIN_S):
                progress.stage = "reading"
                body = await call.read()
                progress.stage = "planning"
                job = await self._plan(plan, body)
                del body  # megabytes, which an answer would keep as long as it streams
                if job.structure is not None:
                    await self._check_structure(job.structure, job.structure_param)
                progress.stage, progress.answer_id = "generation", job.answer_id
                if job.stream:
                    await self._runner.stream(job, arrived, call)
                else:
                    await self._runner.whole(job, arrived, call)
        except TimeoutError as e:
            raise DeadlineExceeded(f"the request did not end within {limit:g} s (--request-timeout)") from e

    async def _check_structure(self, structure: Structure, param: str) -> None:
        if self._grammars is None:
            raise InvalidRequest(f"{param}: not available here", param=param)
        await self._grammars.check(structure, param)

    @staticmethod
    async def _plan(plan: Plan, body: bytes) -> Job:
        """A short body is planned here and now, unless that turns out to take long."""
        if len(body) <= _OFF_LOOP_BYTES:
            try:
                return plan(body, briefly=True)
            except NeedsThread:
                pass
        return await asyncio.to_thread(plan, body)

    async def _last_words(self, call: Call, error: RequestError) -> None:
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await call.write(error_event(error))
                await call.end()
        except (TimeoutError, ConnectionResetError) as e:
            raise Cut from e

    def _authorise(self, request: Request) -> None:
        if not self._key:
            return
        scheme, _, token = authorization(request.scope).partition(" ")
        given = token.strip().encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._key) or scheme.lower() != "bearer":
            raise _Unauthorised("Authorization: send a valid API key as `Bearer KEY`", param="Authorization")

    def _count(self, error: RequestError) -> None:
        if self._metrics is not None:
            self._metrics.failed(error.status, error.code)

    def _model(self, name: str) -> Model:
        return Model(
            id=name, created=self._started, max_model_len=self._backend.max_model_len or self._model_limit or None
        )
