"""Real spans: OpenTelemetry's SDK, exported by OTLP over HTTP from a thread of its own.

A request never waits for an exporter: an ended span goes into a bounded queue, where the oldest make room when it is
full, and a collector that is slow or gone costs spans and a warning.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import requests
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace import Tracer as OtelTracer
from opentelemetry.trace.propagation import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ..errors import RequestError
from .span import NO_SPAN, Headers, Span, Value

_log = logging.getLogger(__name__)

QUEUE = 4096
"""Ended spans that wait for export; a request with one attempt has nine."""
_BATCH = 512
_DELAY_MS = 1000.0
_EXPORT_S = 5.0
"""For one batch, tries included."""
_MOST_ANSWER = 1 << 16
"""Bytes that are read of a collector's answer, of which only the status and its head are of use."""
_CLOSE_S = 3.0
_READINGS = 3
_W3C = TraceContextTextMapPropagator()
# It warns of each header that is too long: any client could fill the log.
logging.getLogger("opentelemetry.trace.propagation.tracecontext").setLevel(logging.ERROR)
_CLIENT = {"attempt"}
_MOST_STATE = 512
"""Characters of a tracestate that are passed on; a longer one is left out, as an engine may refuse such a head. W3C
asks for at least as many (https://www.w3.org/TR/trace-context/#tracestate-limits)."""


class _Span:
    def __init__(self, tracer: OtelTracer, span: OtelSpan) -> None:
        self.recording = span.get_span_context().trace_flags.sampled
        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span, Context())

    def child(self, name: str, attributes: Mapping[str, Value] | None = None, *, at: float | None = None) -> Span:
        kind = SpanKind.CLIENT if name in _CLIENT else SpanKind.INTERNAL
        span = self._tracer.start_span(name, self._context, kind, attributes, start_time=_wall(at))
        return _Span(self._tracer, span)

    def set(self, attributes: Mapping[str, Value]) -> None:
        self._span.set_attributes(attributes)

    def fail(self, error: RequestError) -> None:
        found: dict[str, Value] = {"error.type": error.code or type(error).__name__}
        found["http.response.status_code"] = error.status
        self._span.set_attributes(found | ({"isthmus.stage": error.stage} if error.stage else {}))
        # Not the message: it may quote what a client wrote.
        self._span.set_status(Status(StatusCode.ERROR, error.code or type(error).__name__))

    def end(self, at: float | None = None) -> None:
        if self._span.is_recording():
            self._span.end(_wall(at))

    def headers(self) -> bytes:
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, self._context)
        if len(carrier.get("tracestate", "")) > _MOST_STATE:
            del carrier["tracestate"]
        return "".join(f"{name}: {value}\r\n" for name, value in carrier.items()).encode("ascii", "replace")


class _Session(requests.Session):
    """Reads no more of an answer than a collector has to say, as it comes: as many as are read keep the connection."""

    def send(self, request: requests.PreparedRequest, **kwargs: Any) -> requests.Response:
        with super().send(request, **{**kwargs, "stream": True}) as answer:
            answer.raw.read(_MOST_ANSWER, decode_content=False)
        return answer


class OtlpTracer:
    """One for a process. `close` it."""

    def __init__(self, endpoint: str, *, sampling: float, role: str, service: str) -> None:
        """`endpoint`: URL of a collector's traces. `sampling`: share of the traces that begin here, 0 to 1; one that
        comes from elsewhere is recorded if it was there. `service`: name of what is served."""
        resource = Resource.create(
            {
                "service.name": f"isthmus-{role}",
                "service.namespace": service,
                "service.version": version("isthmus-runtime"),
            }
        )
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sampling)), resource=resource, shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_S, session=_Session())
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter, max_queue_size=QUEUE, schedule_delay_millis=_DELAY_MS, max_export_batch_size=_BATCH
            )
        )
        self._tracer = self._provider.get_tracer("isthmus", version("isthmus-runtime"))

    def request(self, name: str, headers: Headers) -> Span:
        """See `Tracer`."""
        span = self._tracer.start_span(name, _W3C.extract(headers, Context()), SpanKind.SERVER)
        return _Span(self._tracer, span) if span.get_span_context().trace_flags.sampled else NO_SPAN

    def remote(self, headers: Headers) -> Span:
        """See `Tracer`."""
        span = get_current_span(_W3C.extract(headers, Context()))
        return _Span(self._tracer, span) if span.get_span_context().trace_flags.sampled else NO_SPAN

    def close(self) -> None:
        """See `Tracer`."""
        ending = threading.Thread(target=self._provider.shutdown, name="tracing-end", daemon=True)
        ending.start()
        ending.join(_CLOSE_S)
        if ending.is_alive():
            _log.warning("traces: the collector has not taken the last spans within %g s", _CLOSE_S)


def _wall(at: float | None) -> int | None:
    """Monotonic seconds as nanoseconds since 1970."""
    if at is None:
        return None
    readings = []
    for _ in range(_READINGS):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after - before, wall - before))
    # A thread that waits for a processor between two clocks takes them apart: a span would end before it begins.
    _, since_1970 = min(readings)
    return int(at * 1e9) + since_1970
