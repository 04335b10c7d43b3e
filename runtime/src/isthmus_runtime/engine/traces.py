"""Spans of an engine's work on one request: queue, prefill, transfer, decode. Only of requests that are traced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ..errors import RequestError
from ..interfaces.steps import RowStart
from ..protocol.calls import PrefillAnswer
from ..request import GenerateRequest, TokenChunk
from ..tracing.span import Span, Value


class StartTimes:
    """When traced requests were first in a step. `started` is called on the engine's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds."""
        self.clock = clock
        self._times: dict[str, float | None] = {}

    def watch(self, sid: str) -> None:
        """From now on, until `forget`."""
        self._times[sid] = None

    def started(self, rows: Iterable[RowStart]) -> None:
        """These rows are in a step that is submitted now."""
        if self._times:
            for row in rows:
                self.note(row.request_id, self.clock())

    def note(self, sid: str, at: float) -> None:
        """It is in a step that was submitted `at`; the first counts."""
        if self._times.get(sid, 0.0) is None:
            self._times[sid] = at

    def of(self, sid: str) -> float | None:
        """None: it has not started."""
        return self._times.get(sid)

    def forget(self, sid: str) -> None:
        """It has ended."""
        self._times.pop(sid, None)


class RequestTrace:
    """The spans of one request in this engine, as children of the router's attempt or of the client's request."""

    def __init__(self, parent: Span, starts: StartTimes, sid: str, request: GenerateRequest) -> None:
        starts.watch(sid)
        self._parent = parent
        self._starts = starts
        self._sid = sid
        self._arrived = starts.clock()
        self._reserved: float | None = None
        self._decode: Span | None = None
        self._prompt: dict[str, Value] = {
            "isthmus.request.id": request.request_id,
            "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
        }
        self._tokens = 0

    def reserved(self) -> None:
        """Blocks wait for the peer's KV."""
        self._reserved = self._starts.clock()
        self._between("queue", self._arrived, self._reserved)

    def chunk(self, chunk: TokenChunk) -> None:
        """Some tokens, or the end."""
        self._tokens += len(chunk.token_ids)
        if self._decode is None and chunk.token_ids:
            self._first(chunk)
        if chunk.finish_reason is not None:
            self._end(chunk)

    def sent(self, answer: PrefillAnswer) -> None:
        """The prompt was computed, and the last of its KV has left."""
        now = self._starts.clock()
        computed = now - answer.transfer_s
        started = self._started(computed)
        self._between("queue", self._arrived, started)
        cached = {"gen_ai.usage.cache_read.input_tokens": answer.cached_tokens}
        self._between("prefill", started, computed, cached)
        # What was hidden behind the computation is in `prefill`.
        self._between("transfer", computed, now, {"isthmus.transfer.bytes": answer.sent_bytes})
        self._starts.forget(self._sid)

    def close(self) -> None:
        """Nobody listens any more. A decode that had not come to its end ends here."""
        self._starts.forget(self._sid)
        if self._decode is not None:
            self._decode.end()

    def _first(self, chunk: TokenChunk) -> None:
        now = self._starts.clock()
        begin = self._arrived if self._reserved is None else self._reserved
        source: dict[str, Value] = {"isthmus.kv.source": chunk.note or "local"}
        if chunk.note == "transferred":
            self._between("transfer", begin, now, source)
        else:
            started = self._started(now)
            # A prompt that is computed after all: its KV did not come.
            self._between("queue" if self._reserved is None else "transfer", begin, started, source)
            cached: dict[str, Value] = {"gen_ai.usage.cache_read.input_tokens": chunk.cached_tokens}
            self._between("prefill", started, now, source | cached)
        self._decode = self._parent.child("decode", self._prompt, at=now)

    def _failed(self, error: RequestError) -> None:
        """It ended before its first token, or before its KV had left."""
        started = self._starts.of(self._sid)
        name = "transfer" if self._reserved is not None else "queue" if started is None else "prefill"
        span = self._parent.child(name, self._prompt, at=self._reserved or started or self._arrived)
        span.fail(error)
        span.end()

    def _end(self, chunk: TokenChunk) -> None:
        assert chunk.finish_reason is not None
        if self._decode is None:
            if chunk.error is not None:
                self._failed(chunk.error)
            return
        self._decode.set(
            {
                "gen_ai.usage.output_tokens": self._tokens,
                "gen_ai.response.finish_reasons": (chunk.finish_reason.value,),
            }
        )
        if chunk.error is not None:
            self._decode.fail(chunk.error)
        self._decode.end()

    def _started(self, otherwise: float) -> float:
        found = self._starts.of(self._sid)
        return otherwise if found is None else found

    def _between(self, name: str, begin: float, end: float, attributes: Mapping[str, Value] | None = None) -> None:
        self._parent.child(name, self._prompt | dict(attributes or {}), at=begin).end(max(begin, end))
