"""HTTP surface of an engine: the router's control channel, probes and metrics. Thin over the backend."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from aiohttp import web
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ValidationError

from ..errors import InvalidRequest, RequestError
from ..httpd import InFlight, error_response, json_response
from ..metrics import CONTENT_TYPE, EngineMetrics, RequestMetrics, TransferMetrics, render
from ..protocol import (
    AbortCall,
    CommitCall,
    DrainAnswer,
    EngineInfo,
    GenerateCall,
    PrefillCall,
    Ticket,
    reserved_line,
    token_line,
)
from ..request import FinishReason, TokenChunk
from .backend import EngineBackend
from .kv_events import KvEventFeed

T = TypeVar("T", bound=BaseModel)
log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
"""A million-token prompt is about 7 MB of JSON."""


@dataclass(slots=True)
class EngineMeters:
    """Every metric of an engine process over one registry."""

    registry: CollectorRegistry
    model: str
    engine: EngineMetrics = field(init=False)
    requests: RequestMetrics = field(init=False)
    transfer: TransferMetrics = field(init=False)
    _seen: dict[str, int] = field(default_factory=dict)

    def grown(self, name: str, total: int) -> int:
        """How much a running total has grown since it was last asked for: what a counter must be increased by."""
        before, self._seen[name] = self._seen.get(name, 0), total
        return total - before

    def __post_init__(self) -> None:
        self.engine = EngineMetrics(self.registry, self.model)
        self.requests = RequestMetrics(self.registry, self.model)
        self.transfer = TransferMetrics(self.registry, self.model)


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
    ) -> None:
        """`kv_events` None: there is no prefix cache, and so no such route."""
        self._backend = backend
        self._info = info
        self._meters = meters
        self._in_flight = in_flight
        self._no_progress_s = no_progress_timeout_s
        self._clock = clock
        self._kv_events = kv_events

    def routes(self) -> list[web.RouteDef]:
        """For `app.add_routes`."""
        feed = self._kv_events
        events = [] if feed is None else [web.get("/internal/kv-events", partial(self.kv_events, feed))]
        return [
            *events,
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/info", self.info),
            web.get("/metrics", self.metrics),
            web.post("/internal/generate", self.generate),
            web.post("/internal/prefill", self.prefill),
            web.post("/internal/commit", self.commit),
            web.post("/internal/abort", self.abort),
            web.get("/internal/drained", self.drained),
        ]

    # ------------------------------------------------------------------------------------------------------ probes

    def unhealthy(self) -> str:
        """Empty, or why this process should be restarted: a broken engine, or work without progress."""
        engine = self._backend.engine
        if engine.failure:
            return engine.failure
        stalled = engine.stalled_s()
        if stalled > self._no_progress_s:
            return f"there is work and no step finished for {stalled:.0f} s (limit {self._no_progress_s:g} s)"
        return ""

    async def health(self, request: web.Request) -> web.Response:
        """200 while the engine makes progress or is idle."""
        reason = self.unhealthy()
        return web.json_response({"status": reason or "ok"}, status=503 if reason else 200)

    async def ready(self, request: web.Request) -> web.Response:
        """200 when new requests are welcome."""
        info = self._info()
        reason = "draining" if self._in_flight.leaving else self.unhealthy() or info.transfer.reason
        if reason:
            return web.json_response({"ready": False, "reason": reason}, status=503)
        return json_response({"ready": True})

    async def info(self, request: web.Request) -> web.Response:
        """EngineInfo, as the router pairs engines by."""
        return web.Response(body=self._info().model_dump_json().encode(), content_type="application/json")

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus text."""
        self._sample()
        return web.Response(body=render(self._meters.registry), headers={"Content-Type": CONTENT_TYPE})

    def _sample(self) -> None:
        engine, meters = self._backend.engine, self._meters
        stats, blocks = engine.snapshot.stats, engine.snapshot.blocks
        usable = max(1, blocks.total - blocks.null)
        meters.engine.running.set(stats.running)
        meters.engine.waiting.set(stats.waiting)
        meters.engine.kv_usage.set(1 - (blocks.free + blocks.cached) / usable)
        meters.engine.quarantined_blocks.set(blocks.quarantined)
        meters.engine.no_progress_seconds.set(engine.stalled_s())
        meters.engine.prefix_queries.inc(meters.grown("queries", stats.prefix_queries))
        meters.engine.prefix_hits.inc(meters.grown("hits", stats.prefix_hits))
        meters.engine.preemptions.inc(meters.grown("preemptions", stats.preemptions))
        meters.engine.never_fit_rejections.inc(meters.grown("never_fit", stats.never_fit))
        for stage, total in list(engine.transfer_failures.items()):
            meters.transfer.failed(stage, meters.grown(f"failed {stage}", total))
        moved = engine.handoff_stats()
        late = stats.unknown_events + (0 if moved is None else moved.dropped)
        meters.transfer.late_messages.inc(meters.grown("late", late))
        meters.transfer.legs.set(0 if moved is None else moved.live)
        meters.transfer.sent_bytes.inc(0 if moved is None else meters.grown("sent", moved.sent_bytes))

    # --------------------------------------------------------------------------------------------- control channel

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Stream tokens as NDJSON; the connection's end is the cancellation."""
        call = await _body(request, GenerateCall)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        try:
            with self._in_flight.track():
                await self._stream(request, response, call)
        except RequestError as error:
            self._meters.requests.failed(error.status, error.code)
            if response.prepared:
                raise
            return error_response(error.located("admission", call.attempt or call.local_attempt))
        except ConnectionResetError:
            # A write found out before the server did that the router has gone.
            self._meters.requests.failed(499, "cancelled")
            log.debug("the reader of %s has left", call.attempt or call.request.request_id)
        return response

    async def _stream(self, request: web.Request, response: web.StreamResponse, call: GenerateCall) -> None:
        stream = self._backend.stream(
            call.request.to_request(),
            attempt=call.attempt,
            local_attempt=call.local_attempt,
            peer_url=call.prefill_url,
            peer_epoch=call.prefill_epoch,
        )
        observer = _Observer(self._meters, self._clock, len(call.request.prompt_token_ids))
        try:
            async for reply in stream:
                if not response.prepared:
                    await response.prepare(request)
                if isinstance(reply, Ticket):
                    await response.write(reserved_line(reply))
                else:
                    observer.chunk(reply)
                    await response.write(token_line(reply))
        except asyncio.CancelledError:
            if not self._in_flight.aborting:
                self._meters.requests.failed(499, "cancelled")
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()  # ours, from InFlight.abort: the router is still there and gets an answer
            refusal = self._in_flight.refusal().located("draining", call.attempt or call.local_attempt)
            if not response.prepared:
                raise refusal from None
            await response.write(token_line(TokenChunk(finish_reason=FinishReason.ERROR, error=refusal)))
        finally:
            await stream.aclose()
        await response.write_eof()

    async def prefill(self, request: web.Request) -> web.Response:
        """Compute and send one prompt."""
        call = await _body(request, PrefillCall)
        try:
            with self._in_flight.track():
                answer = await self._backend.prefill(call)
        except RequestError as error:
            self._meters.requests.failed(error.status, error.code)
            return error_response(error.located("admission", call.attempt))
        self._meters.transfer.seconds.observe(answer.transfer_s)
        self._meters.requests.prompt_tokens.inc(answer.num_tokens)
        return web.Response(body=answer.model_dump_json().encode(), content_type="application/json")

    async def commit(self, request: web.Request) -> web.Response:
        """Prefill has sent everything, or has failed."""
        self._backend.engine.commit(await _body(request, CommitCall))
        return json_response({})

    async def abort(self, request: web.Request) -> web.Response:
        """End a request wherever it is."""
        call = await _body(request, AbortCall)
        self._backend.engine.abort(call.request_id, call.attempt, "aborted by the router")
        return json_response({})

    async def drained(self, request: web.Request) -> web.Response:
        """Whether a byte of an attempt may still leave this process."""
        attempt = request.query.get("attempt", "")
        if not attempt:
            raise InvalidRequest("query parameter attempt is missing", param="attempt")
        answer = DrainAnswer(
            attempt=attempt, drained=self._backend.engine.is_drained(attempt), epoch=self._info().transfer.epoch
        )
        return web.Response(body=answer.model_dump_json().encode(), content_type="application/json")

    async def kv_events(self, feed: KvEventFeed, request: web.Request) -> web.StreamResponse:
        """Changes of the prefix cache as NDJSON, until the reader leaves or this process ends."""
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        try:
            async for line in feed.lines():
                await response.write(line.model_dump_json().encode() + b"\n")
            await response.write_eof()
        except ConnectionResetError:
            log.debug("the reader of KV events at %s has left", request.remote)
        return response


class _Observer:
    """Times of one stream, for the request metrics."""

    def __init__(self, meters: EngineMeters, clock: Callable[[], float], prompt_tokens: int) -> None:
        self._meters = meters
        self._clock = clock
        self._start = clock()
        self._last: float | None = None
        meters.requests.prompt_tokens.inc(prompt_tokens)

    def chunk(self, chunk: TokenChunk) -> None:
        """Note one chunk of the stream."""
        requests, now = self._meters.requests, self._clock()
        if chunk.token_ids:
            requests.generation_tokens.inc(len(chunk.token_ids))
            if self._last is None:
                requests.time_to_first_token.observe(now - self._start)
            else:
                requests.inter_token_latency.observe((now - self._last) / len(chunk.token_ids))
            self._last = now
        if chunk.note:
            self._meters.transfer.prompt(chunk.note)
        if chunk.error is not None:
            requests.failed(chunk.error.status, chunk.error.code)
        elif chunk.finish_reason is not None:
            requests.succeeded(chunk.finish_reason.value, now - self._start)


async def _body(request: web.Request, model: type[T]) -> T:
    raw = await request.read()
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise InvalidRequest(f"{request.path}: {where}: {first['msg']}", param=where) from error
