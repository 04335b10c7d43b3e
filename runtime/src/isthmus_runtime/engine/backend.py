"""An engine as a Backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import lru_cache
from itertools import chain

from ..errors import InvalidRequest
from ..interfaces.backend import Backend
from ..protocol.calls import CommitCall, PrefillAnswer, PrefillCall
from ..protocol.request import may_begin_early
from ..protocol.ticket import Ticket
from ..request import GENERATES, GenerateRequest, ServedTask, TokenChunk, WrittenIds
from ..tracing.span import current
from .exchange import Reply
from .long_reply import LongReply
from .seam import Engine
from .streams import Inbox, Streams
from .traces import RequestTrace, StartTimes


class EngineBackend(Backend):
    """Serves requests by one engine."""

    def __init__(
        self,
        engine: Engine,
        streams: Streams,
        *,
        vocab_size: int = 0,
        task: ServedTask = GENERATES,
        starts: StartTimes | None = None,
    ) -> None:
        """`vocab_size`: requests with other ids are refused; one would break the executor for everybody. 0: unknown.

        `starts`: what the engine tells of the rows that it starts, for traces; None: there are none.
        """
        self.engine = engine
        self._streams = streams
        self._starts = starts
        self._vocab_size = vocab_size
        self._task = task
        self.generated_tokens = 0
        """Given out since the start."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, tokens."""
        return self.engine.max_model_len

    @property
    def task(self) -> ServedTask:
        """What the model is served for."""
        return self._task

    def ready(self) -> str:
        """Empty, or why the engine cannot serve."""
        return self.engine.status().failure

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream the answer; closing the generator aborts the request."""
        # Closed with this generator: left to the collector, the request would run on until that comes by.
        async with aclosing(self.stream(request)) as stream:
            async for reply in stream:
                assert isinstance(reply, TokenChunk)
                yield reply

    async def stream(
        self,
        request: GenerateRequest,
        *,
        attempt: str = "",
        local_attempt: str = "",
        peer_url: str = "",
        peer_epoch: str = "",
        client: str = "",
    ) -> AsyncGenerator[TokenChunk | Ticket, None]:
        """Like `generate`; with an attempt, the Ticket for the prefill peer comes first. `client`: as
        `GenerateRequest.client`.

        Raises the RequestError that ends the request when nothing was yielded before it.
        """
        self._check(request)
        name = attempt or local_attempt
        sid = name or request.request_id
        inbox = self._claim(
            sid,
            lambda: self.engine.abort(request.request_id, name, "the client reads too slowly", answer=False),
            client or request.whose,
        )
        trace = self._trace(sid, request)
        ended = first = False
        try:
            self.engine.generate(
                request,
                attempt=attempt,
                local_attempt=local_attempt,
                peer_url=peer_url,
                peer_epoch=peer_epoch,
            )
            while not ended:
                reply = await _next(inbox)
                assert not isinstance(reply, PrefillAnswer)
                if isinstance(reply, TokenChunk):
                    ended = reply.finish_reason is not None
                    self.generated_tokens += len(reply.token_ids)
                    if trace is not None:
                        trace.chunk(reply)
                    if reply.error is not None and not first:
                        raise reply.error
                elif trace is not None:
                    trace.reserved()
                first = True
                yield reply
        finally:
            self._streams.close(sid)
            if trace is not None:
                trace.close()
            if not ended:
                self.engine.abort(request.request_id, name, "the client disconnected", answer=False)

    async def prefill(self, call: PrefillCall, client: str = "") -> PrefillAnswer:
        """Compute and send one prompt. Raises the RequestError that ended it; cancellation aborts it. `client`: as
        `GenerateRequest.client`."""
        async with aclosing(self.prefill_lines(call, client)) as lines:
            async for line in lines:
                if isinstance(line, PrefillAnswer):
                    return line
        raise AssertionError("a prompt ended without an answer or an error")

    async def prefill_lines(
        self, call: PrefillCall, client: str = ""
    ) -> AsyncGenerator[TokenChunk | PrefillAnswer, None]:
        """The same, closed to abort it. Where the call has no ticket, first an empty chunk, after which `engine.ticket`
        may be called, then the first token unless it is the last."""
        request = call.request.to_request()
        if call.ticket is None and not may_begin_early(request):
            raise InvalidRequest("ticket: a prompt as text, with a structure or with scores needs it", param="ticket")
        if client:
            request = replace(request, client=client)
        self._check(request)
        inbox = self._claim(call.attempt, whose=request.whose)
        trace = self._trace(call.attempt, request)
        ended = False
        try:
            self.engine.prefill(request, call.attempt, call.ticket)
            if call.ticket is None:
                yield TokenChunk()
            while not ended:
                reply = await _next(inbox)
                if isinstance(reply, TokenChunk) and reply.error is None:
                    yield reply
                    continue
                ended = True
                if isinstance(reply, PrefillAnswer):
                    if trace is not None:
                        trace.sent(reply)
                    yield reply
                    return
                assert isinstance(reply, TokenChunk) and reply.error is not None
                if trace is not None:
                    trace.chunk(reply)
                raise reply.error
        finally:
            self._streams.close(call.attempt)
            if trace is not None:
                trace.close()
            if not ended:
                request_id = call.request.request_id
                self.engine.abort(request_id, call.attempt, "the router closed the prefill call", answer=False)

    def commit(self, call: CommitCall) -> None:
        """`Engine.commit`. Raises InvalidRequest for a first token that is none of the model's."""
        if self._vocab_size and call.first_token is not None and call.first_token >= self._vocab_size:
            raise InvalidRequest(
                f"first_token: {call.first_token} is not in the model's vocabulary (0 to {self._vocab_size - 1})",
                param="first_token",
            )
        self.engine.commit(call)

    def _trace(self, sid: str, request: GenerateRequest) -> RequestTrace | None:
        span = current()
        if self._starts is None or not span.recording:
            return None
        return RequestTrace(span, self._starts, sid, request)

    def _check(self, request: GenerateRequest) -> None:
        embeds = self.task.kind == "embed"
        if embeds != (request.pooling is not None):
            wanted = "tokens" if embeds else "embeddings"
            raise InvalidRequest(
                f"this engine runs with --task {self.task.kind} and has no {wanted} to give", param="pooling"
            )
        if request.pooling is not None and request.pooling.dimensions > self.task.dimensions:
            raise InvalidRequest(
                f"dimensions: {request.pooling.dimensions}, but the model's vectors have {self.task.dimensions}",
                param="dimensions",
            )
        sampling = request.sampling
        words, prompt = chain.from_iterable(sampling.bad_words), request.prompt_token_ids
        for name, ids in (
            ("prompt", prompt.ends if isinstance(prompt, WrittenIds) else prompt),
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", [i for i, _ in sampling.logit_bias]),
            ("allowed_token_ids", _ends(sampling.allowed_token_ids)),
            ("bad_words", tuple(words) if all(sampling.bad_words) else (-1,)),
        ):
            low, high = min(ids, default=0), max(ids, default=0)
            if self._vocab_size and (low < 0 or high >= self._vocab_size):
                raise InvalidRequest(
                    f"{name}: token id {low if low < 0 else high} is not in the model's vocabulary "
                    f"(0 to {self._vocab_size - 1}); tokenise with the engine's own model",
                    param=name,
                )

    def _claim(self, sid: str, dropped: Callable[[], None] = lambda: None, whose: str = "") -> Inbox:
        if self._streams.busy(sid):
            raise InvalidRequest(f"request id {sid!r} is already in progress; use a new one", param="request_id")
        return self._streams.open(sid, dropped, whose)


@lru_cache(8)
def _ends(ids: tuple[int, ...]) -> tuple[int, ...]:
    """The least and the largest. Kept: each of 128 choices may allow the same hundred thousand."""
    return (min(ids), max(ids)) if ids else ()


async def _next(inbox: Inbox) -> Reply:
    reply = await inbox.get()
    return await asyncio.to_thread(reply.read) if isinstance(reply, LongReply) else reply
