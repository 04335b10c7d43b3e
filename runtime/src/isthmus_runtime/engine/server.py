"""HTTP surface of an engine: the router's control channel, probes and metrics. Thin over the backend."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated

from fastapi import FastAPI, Query, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ..credentials import Credentials
from ..errors import InvalidRequest, RequestError
from ..metrics import CONTENT_TYPE, Scrapes
from ..protocol.calls import AbortCall, AdapterCall, CommitCall, GenerateCall, PrefillAnswer, PrefillCall, TicketCall
from ..protocol.info import EngineInfo
from ..protocol.lines import prefill_answer_json, reserved_line, sent_line, token_line
from ..protocol.request import CLIENT_HEADER, MOST_OF_A_CLIENT
from ..protocol.ticket import DrainAnswer, Ticket
from ..request import FinishReason, GenerateRequest, PromptText, TokenChunk
from ..serving.app import errors, json_body, model_response, read_model
from ..serving.call import Call, add_call_route
from ..serving.in_flight import InFlight
from ..serving.memory import MemoryGuard
from ..tokenising import Tokenising
from ..tracing.span import NO_TRACER, Tracer, within
from .backend import EngineBackend
from .kv_events import KvEventFeed
from .long_reply import has_many_scores
from .meters import EngineMeters, Observer

log = logging.getLogger(__name__)

BODIES = (GenerateCall, PrefillCall, TicketCall, CommitCall, AbortCall, AdapterCall)
"""What `make_app` has to know for the document."""
_NDJSON = {"content-type": "application/x-ndjson"}


class Health(BaseModel):
    """`ok`, or why this process should be restarted; and how near it is to the limit of its memory."""

    status: str
    memory: str


class Readiness(BaseModel):
    """Whether new requests are welcome, or why not."""

    ready: bool
    reason: str = ""


class Done(BaseModel):
    """Nothing more to say."""


class EngineServer:
    """Routes of one engine. Handlers are thin: parse, hand to the backend, frame the answer."""

    def __init__(
        self,
        backend: EngineBackend,
        info: Callable[[], EngineInfo],
        meters: EngineMeters,
        in_flight: InFlight,
        *,
        no_progress_timeout_s: float,
        clock: Callable[[], float],
        kv_events: KvEventFeed | None = None,
        credentials: Credentials | None = None,
        tracer: Tracer = NO_TRACER,
        tokenise: Callable[[PromptText], Sequence[int]] | None = None,
        memory: MemoryGuard | None = None,
    ) -> None:
        """`kv_events` None: there is no prefix cache, so the route is not added. `credentials`: without usable ones it
        is not ready. `tokenise` raises InvalidRequest; None: prompts come as ids alone."""
        guard = self._memory = MemoryGuard() if memory is None else memory
        self._tokenising = None
        if tokenise is not None:
            tokenising = Tokenising(tokenise, one_by_one=lambda: guard.tight, most=lambda: guard.room_on_the_way)
            guard.add_reserve(lambda: tokenising.set_aside)
            self._tokenising = tokenising
        self._credentials = credentials
        self._tracer = tracer
        self._backend = backend
        self._info = info
        self._meters = meters
        self._in_flight = in_flight
        self._no_progress_s = no_progress_timeout_s
        self._clock = clock
        self._kv_events = kv_events
        self._scrapes = Scrapes(meters.registry, lambda: meters.sample(backend.engine.status()))

    def add_metrics(self, app: FastAPI) -> None:
        """Add /metrics."""
        app.add_api_route("/metrics", self.metrics, tags=["probes"], response_class=PlainTextResponse)

    def add_probes(self, app: FastAPI) -> None:
        """Add /health, /ping, /ready and /info."""
        unwell: dict[int | str, dict[str, object]] = {503: {"model": Health}}
        for path in ("/health", "/ping"):
            app.add_api_route(path, self.health, tags=["probes"], response_model=Health, responses=unwell)
        unready: dict[int | str, dict[str, object]] = {503: {"model": Readiness}}
        app.add_api_route("/ready", self.ready, tags=["probes"], response_model=Readiness, responses=unready)
        app.add_api_route("/info", self.info, tags=["probes"], response_model=EngineInfo)

    def add_internal(self, app: FastAPI) -> None:
        """Add what routers call, and peers: all of it is under /internal/."""
        ndjson = {200: {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}}}
        add_call_route(
            app,
            "/internal/generate",
            self.generate,
            "POST",
            tags=["internal"],
            openapi_extra=json_body(GenerateCall),
            responses={**errors(404, 429, 499, 502, 504), **ndjson},
        )
        add_call_route(
            app,
            "/internal/prefill",
            self.prefill,
            "POST",
            tags=["internal"],
            openapi_extra=json_body(PrefillCall),
            responses={**errors(404, 429, 499, 502, 504), 200: {"model": PrefillAnswer, **ndjson[200]}},
        )
        for name, endpoint, body, answer in (
            ("ticket", self.ticket, TicketCall, Done),
            ("commit", self.commit, CommitCall, Done),
            ("abort", self.abort, AbortCall, Done),
            ("adapter", self.adapter, AdapterCall, Done),
        ):
            app.add_api_route(
                f"/internal/{name}",
                endpoint,
                methods=["POST"],
                tags=["internal"],
                response_model=answer,
                openapi_extra=json_body(body),
                responses=errors(404, 429, 499, 502, 504),
            )
        app.add_api_route("/internal/drained", self.drained, tags=["internal"], responses=errors())
        if self._kv_events is not None:
            add_call_route(app, "/internal/kv-events", self.kv_events, "GET", tags=["internal"], responses=ndjson)

    # ------------------------------------------------------------------------------------------------------ probes

    def unhealthy(self) -> str:
        """Empty, or why this process should be restarted: a broken engine, or work without progress."""
        engine = self._backend.engine.status()
        if engine.failure or engine.problem:
            return engine.failure or engine.problem
        if engine.stalled_s > self._no_progress_s:
            return (
                f"there is work but no step has finished for {engine.stalled_s:.0f} s (limit {self._no_progress_s:g} s)"
            )
        return ""

    async def health(self) -> Response:
        """200 while the engine makes progress or is idle."""
        reason = self.unhealthy()
        return JSONResponse({"status": reason or "ok", "memory": self._memory.told}, 503 if reason else 200)

    async def ready(self) -> Response:
        """200 when new requests are welcome."""
        info = self._info()
        unknown = "" if self._credentials is None else self._credentials.problem()
        reason = "draining" if self._in_flight.leaving else self.unhealthy() or unknown or info.transfer.reason
        return JSONResponse({"ready": not reason, "reason": reason}, 503 if reason else 200)

    async def info(self) -> Response:
        """What routers pair engines by."""
        return model_response(self._info())

    async def metrics(self) -> Response:
        """Prometheus text."""
        return Response(await self._scrapes.text(), headers={"Content-Type": CONTENT_TYPE})

    # --------------------------------------------------------------------------------------------- control channel

    async def generate(self, call: Call) -> None:
        """Stream tokens as NDJSON; the connection's end is the cancellation."""
        what = await read_model(call, GenerateCall)
        try:
            with self._in_flight.track(), within(self._tracer.remote(call.headers)):
                await self._stream(what, call)
        except RequestError as error:
            self._meters.requests.failed(error.status, error.code)
            raise error.located("admission", what.attempt or what.local_attempt) from error
        except ConnectionResetError:
            self._reader_left(what)

    def _reader_left(self, what: GenerateCall | PrefillCall) -> None:
        self._meters.requests.failed(499, "cancelled")
        log.debug("the reader of %s has disconnected", what.attempt or what.request.request_id)

    async def _stream(self, what: GenerateCall, call: Call) -> None:
        request = what.request.to_request()
        client = _client(call.headers)
        if request.structure is not None or request.prompt is not None:
            request = replace(request, client=client)
        told = 0
        if request.prompt is not None:
            try:
                request = await self._tokenised(request)
            except asyncio.CancelledError:
                error = self._in_flight.cancelled()
                if error is None:
                    self._reader_left(what)
                    raise
                raise error.located("draining", what.attempt or what.local_attempt) from None
            told = len(request.prompt_token_ids)
        stream = self._backend.stream(
            request,
            attempt=what.attempt,
            local_attempt=what.local_attempt,
            peer_url=what.prefill_url,
            peer_epoch=what.prefill_epoch,
            client=client,
        )
        observer = Observer(self._meters, self._clock, len(request.prompt_token_ids))
        try:
            async for reply in stream:
                if not call.begun:
                    await call.begin(_NDJSON)
                if isinstance(reply, Ticket):
                    await call.write(reserved_line(reply))
                else:
                    chunk, told = reply._replace(prompt_tokens=told) if told else reply, 0
                    observer.chunk(chunk)
                    long = has_many_scores(chunk.prompt_logprobs)
                    await call.write(await asyncio.to_thread(token_line, chunk) if long else token_line(chunk))
        except asyncio.CancelledError:
            error = self._in_flight.cancelled()
            if error is None:
                self._reader_left(what)
                raise
            refusal = error.located("draining", what.attempt or what.local_attempt)
            if not call.begun:
                raise refusal from None
            await call.write(token_line(TokenChunk(finish_reason=FinishReason.ERROR, error=refusal)))
        finally:
            await stream.aclose()
        await call.end()

    async def _tokenised(self, request: GenerateRequest) -> GenerateRequest:
        if self._tokenising is None:
            raise InvalidRequest("prompt: this engine has no tokenizer; send prompt_token_ids", param="prompt")
        return await self._tokenising.by_ids(request)

    async def prefill(self, call: Call) -> None:
        """Compute and send one prompt: one answer, or lines where the ticket is to follow."""
        what = await read_model(call, PrefillCall)
        try:
            await self._prefill_answer(what, call)
        except ConnectionResetError:
            self._reader_left(what)

    async def _prefill_answer(self, what: PrefillCall, call: Call) -> None:
        try:
            with self._in_flight.track(), within(self._tracer.remote(call.headers)):
                answer = await self._prefill(what, call)
        except RequestError as error:
            self._meters.requests.failed(error.status, error.code)
            located = error.located("admission", what.attempt)
            if not call.begun:
                raise located from error
            await call.write(token_line(TokenChunk(finish_reason=FinishReason.ERROR, error=located)))
            await call.end()
            return
        self._meters.transfer.seconds.observe(answer.transfer_s)
        self._meters.requests.prompt_tokens.inc(answer.num_tokens)
        if call.begun:
            await call.write(sent_line(answer))
            await call.end()
            return
        if has_many_scores(answer.prompt_logprobs):
            written = await asyncio.to_thread(prefill_answer_json, answer)
        else:
            written = prefill_answer_json(answer)
        await call.reply(200, {"content-type": "application/json"}, written)

    async def _prefill(self, what: PrefillCall, call: Call) -> PrefillAnswer:
        if what.request.prompt is not None:
            raise InvalidRequest("prompt: prefill takes prompt_token_ids", param="prompt")
        try:
            if what.ticket is not None:
                return await self._backend.prefill(what, _client(call.headers))
            async with aclosing(self._backend.prefill_lines(what, _client(call.headers))) as lines:
                async for line in lines:
                    if isinstance(line, PrefillAnswer):
                        return line
                    if not call.begun:
                        await call.begin(_NDJSON)
                    await call.write(token_line(line))
            raise AssertionError("a prompt ended without an answer or an error")
        except asyncio.CancelledError:
            error = self._in_flight.cancelled()
            if error is None:
                raise
            raise error.located("draining", what.attempt) from None

    async def ticket(self, request: Request) -> Response:
        """Decode has reserved for a prompt that was begun without its ticket."""
        self._backend.engine.ticket((await read_model(request, TicketCall)).ticket)
        return model_response(Done())

    async def commit(self, request: Request) -> Response:
        """Prefill has sent everything, or has failed."""
        self._backend.commit(await read_model(request, CommitCall))
        return model_response(Done())

    async def abort(self, request: Request) -> Response:
        """End a request wherever it is."""
        call = await read_model(request, AbortCall)
        self._backend.engine.abort(call.request_id, call.attempt, "aborted by the router")
        return model_response(Done())

    async def adapter(self, request: Request) -> Response:
        """Load an adapter, or unload it."""
        call = await read_model(request, AdapterCall)
        with self._in_flight.track():
            await self._backend.engine.change_adapter(call.name, call.path, replace=call.replace)
        return model_response(Done())

    async def drained(self, attempt: Annotated[str, Query(min_length=1)]) -> DrainAnswer:
        """Whether a byte of an attempt may still leave this process."""
        drained = await self._backend.engine.is_drained(attempt)
        return DrainAnswer(attempt=attempt, drained=drained, epoch=self._info().transfer.epoch)

    async def kv_events(self, call: Call) -> None:
        """Changes of the prefix cache as NDJSON, until the reader leaves or this process ends."""
        feed = self._kv_events
        assert feed is not None  # else there is no such route
        await call.begin(_NDJSON)
        async for line in feed.lines():
            await call.write(line.model_dump_json().encode() + b"\n")
        await call.end()


def _client(headers: Mapping[str, str]) -> str:
    return headers.get(CLIENT_HEADER, "")[:MOST_OF_A_CLIENT]
