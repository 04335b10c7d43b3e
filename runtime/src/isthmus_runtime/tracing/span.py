"""A span as the other parts see it. Without tracing each is `NO_SPAN`, and costs a call that does nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from ..errors import RequestError

Value = str | int | float | bool | tuple[str, ...]
Headers = Mapping[str, str]


class Span(Protocol):
    """One piece of work on a request. Times are monotonic seconds (`time.monotonic`); None is now."""

    recording: bool
    """Whether anybody will read what is set."""

    def child(self, name: str, attributes: Mapping[str, Value] | None = None, *, at: float | None = None) -> Span:
        """A span within this one, begun `at`; end it."""

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Add attributes, by OpenTelemetry's conventions where these have a name (gen_ai.*, http.*, server.*)."""

    def fail(self, error: RequestError) -> None:
        """Mark it as failed, with the error's code and stage."""

    def end(self, at: float | None = None) -> None:
        """It is over, and may be exported. Never blocks; the second call does nothing."""

    def headers(self) -> bytes:
        """Header lines for a call to a peer, each ended by CRLF, so that the peer's spans become children of this."""


class Tracer(Protocol):
    """Begins what continues a trace from elsewhere, or starts one."""

    def request(self, name: str, headers: Headers) -> Span:
        """A request of a client, in the trace that its headers (traceparent, tracestate) name, or a new one."""

    def remote(self, headers: Headers) -> Span:
        """The peer's span that a call's headers name, as a parent only; NO_SPAN without one that is sampled."""

    def close(self) -> None:
        """Export what is there, within 3 seconds."""


class _NoSpan:
    recording = False

    def child(self, name: str, attributes: Mapping[str, Value] | None = None, *, at: float | None = None) -> Span:
        return self

    def set(self, attributes: Mapping[str, Value]) -> None:
        pass

    def fail(self, error: RequestError) -> None:
        pass

    def end(self, at: float | None = None) -> None:
        pass

    def headers(self) -> bytes:
        return b""


NO_SPAN: Span = _NoSpan()


class _NoTracer:
    def request(self, name: str, headers: Headers) -> Span:
        return NO_SPAN

    def remote(self, headers: Headers) -> Span:
        return NO_SPAN

    def close(self) -> None:
        pass


NO_TRACER: Tracer = _NoTracer()

_current: ContextVar[Span] = ContextVar("span", default=NO_SPAN)


def current() -> Span:
    """The span of what this task works on."""
    return _current.get()


@contextmanager
def within(span: Span) -> Iterator[Span]:
    """A block, with the tasks it starts, whose `current` is `span`."""
    if not span.recording:
        yield span
        return
    token = _current.set(span)
    try:
        yield span
    finally:
        _current.reset(token)
