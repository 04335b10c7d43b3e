"""Spans of real processes at a collector of our own: one trace through router, prefill, transfer and decode."""

from __future__ import annotations

import gzip
import itertools
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from processes import Stack, free_port, stack

pytestmark = pytest.mark.e2e

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
DEADLINE_S = 30.0


class Collector:
    """Takes traces as OTLP over HTTP, and keeps them. `hold`: an event before which it answers nobody."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []
        """(service.name, span), in the order of arrival."""
        self.hold: threading.Event | None = None
        self.asked = threading.Event()
        self._changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.asked.set()
                if collector.hold is not None:
                    collector.hold.wait(DEADLINE_S)
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector._take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serve(self) -> Iterator[Collector]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join(DEADLINE_S)

    def _take(self, request: ExportTraceServiceRequest) -> None:
        with self._changed:
            for resource in request.resource_spans:
                names = {a.key: a.value.string_value for a in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self.spans += [(names["service.name"], span) for span in scope.spans]
            self._changed.notify_all()

    def until(self, done: Callable[[list[tuple[str, Span]]], bool]) -> list[tuple[str, Span]]:
        with self._changed:
            assert self._changed.wait_for(lambda: done(self.spans), DEADLINE_S), sorted(
                (service, span.name, span.trace_id.hex()) for service, span in self.spans
            )
            return list(self.spans)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector().serve() as running:
        yield running


@pytest.fixture(scope="module")
def service(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    traced = ("--trace-endpoint", collector.url, "--drain-timeout", "5s")
    tmp = tmp_path_factory.mktemp("traces")
    with stack(tmp, "direct", engine_args=traced, router_args=traced) as running:
        yield running


def ask(url: str, headers: dict[str, str] | None = None, **more: Any) -> int:
    body = {"prompt": list(range(1, 60)), "max_tokens": 5, "ignore_eos": True, "temperature": 0, **more}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})}
    )
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def of(trace: str, spans: list[tuple[str, Span]]) -> list[tuple[str, Span]]:
    return [(service, span) for service, span in spans if span.trace_id.hex() == trace]


def attributes(span: Span) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


WHOLE = {
    ("isthmus-router", "request"),
    ("isthmus-router", "tokenise"),
    ("isthmus-router", "attempt"),
    ("isthmus-prefill", "queue"),
    ("isthmus-prefill", "prefill"),
    ("isthmus-prefill", "transfer"),
    ("isthmus-decode", "queue"),
    ("isthmus-decode", "transfer"),
    ("isthmus-decode", "decode"),
}


ORDER = {"isthmus-prefill": ("queue", "prefill", "transfer"), "isthmus-decode": ("queue", "transfer", "decode")}


def test_one_trace_holds_what_every_process_did(service: Stack, collector: Collector) -> None:
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=value"}
    assert ask(service.url("router"), headers, stream=True) == 200
    spans = of(TRACE, collector.until(lambda spans: len(of(TRACE, spans)) >= len(WHOLE)))
    assert sorted((who, span.name) for who, span in spans) == sorted(WHOLE)
    by_id = {span.span_id: (who, span) for who, span in spans}
    named = {(who, span.name): span for who, span in spans}
    request, attempt = named["isthmus-router", "request"], named["isthmus-router", "attempt"]
    assert request.parent_span_id.hex() == CALLER and request.kind == Span.SPAN_KIND_SERVER
    assert attempt.parent_span_id == request.span_id and attempt.kind == Span.SPAN_KIND_CLIENT
    for who, span in spans:
        assert span.trace_state == "vendor=value"
        assert span.status.code == 0, span.status
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        if who != "isthmus-router":
            assert by_id[span.parent_span_id][1] is attempt
            # Clocks of one machine: a piece lies within the whole, but for the conversion from monotonic time.
            assert span.start_time_unix_nano >= request.start_time_unix_nano - 5_000_000
    for who, order in ORDER.items():
        for before, after in itertools.pairwise(named[who, name] for name in order):
            assert before.end_time_unix_nano <= after.start_time_unix_nano + 2_000_000
    told = attributes(request)
    assert (told["gen_ai.operation.name"], told["gen_ai.request.model"]) == ("text_completion", "test")
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (59, 5)
    assert told["http.response.status_code"] == 200 and told["url.path"] == "/v1/completions"
    assert attributes(attempt)["server.port"] == service.ports["decode0"]
    assert attributes(named["isthmus-decode", "decode"])["gen_ai.usage.output_tokens"] == 5
    assert attributes(named["isthmus-prefill", "transfer"])["isthmus.transfer.bytes"] > 0
    assert not [key for span in named.values() for key, value in attributes(span).items() if "prompt" in key]


def test_a_request_without_a_trace_begins_one_and_an_unsampled_one_is_left_alone(
    service: Stack, collector: Collector
) -> None:
    before = {span.trace_id for _, span in collector.spans}
    unsampled = "0" * 31 + "7"
    assert ask(service.url("router"), {"traceparent": f"00-{unsampled}-{CALLER}-00"}) == 200
    assert ask(service.url("router"), {"traceparent": "nonsense"}) == 200

    def whole(spans: list[tuple[str, Span]]) -> bool:
        fresh = [span for _, span in spans if span.trace_id not in before]
        return len(fresh) >= len(WHOLE)

    fresh = [span for _, span in collector.until(whole) if span.trace_id not in before]
    assert len({span.trace_id for span in fresh}) == 1
    assert not of(unsampled, collector.spans)


def test_an_error_is_on_the_request_that_it_ended(service: Stack, collector: Collector) -> None:
    trace = "a" * 32
    assert ask(service.url("router"), {"traceparent": f"00-{trace}-{CALLER}-01"}, max_tokens=10**6) == 400
    spans = collector.until(lambda spans: "request" in {span.name for _, span in of(trace, spans)})
    request = next(span for _, span in of(trace, spans) if span.name == "request")
    assert request.status.code == 2 and request.status.message == attributes(request)["error.type"]
    assert attributes(request)["http.response.status_code"] == 400


def test_a_collector_that_hangs_or_is_gone_holds_nobody_up(service: Stack, tmp_path: Path) -> None:
    silent = Collector()
    silent.hold = threading.Event()
    nobody = f"http://127.0.0.1:{free_port()}"
    with silent.serve():
        for endpoint in (silent.url, nobody):
            other = Stack(
                tmp_path,
                "direct",
                router_args=("--trace-endpoint", endpoint, "--drain-timeout", "1s"),
                ports={**service.ports, "router": free_port()},
            )
            router = other.spawn("router")
            try:
                other.ready("router")
                assert ask(other.url("router")) == 200
                if endpoint == silent.url:
                    assert silent.asked.wait(DEADLINE_S)
                for _ in range(20):
                    assert ask(other.url("router")) == 200
                # The collector still holds on; a process that waited for it would be killed, and not end with 0.
                assert router.stop() == 0, router.tail()
            finally:
                router.stop()
        silent.hold.set()
