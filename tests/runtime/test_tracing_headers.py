"""Headers that come from strangers and go on to engines: whatever they hold, a head stays whole."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from isthmus_runtime.tracing.otlp import OtlpTracer

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
HEAD = re.compile(rb"traceparent: 00-[0-9a-f]{32}-[0-9a-f]{16}-0[13]\r\n(tracestate: [\x20-\x7e]{1,512}\r\n)?")


@pytest.fixture(scope="module")
def tracer() -> Iterator[OtlpTracer]:
    made = OtlpTracer("http://127.0.0.1:9/v1/traces", sampling=1.0, role="router", service="s")
    yield made
    # Nothing was ended, so nothing is sent.
    made.close()


@given(state=st.text(st.characters(max_codepoint=255), max_size=80))
@example(state="a=1,b=2")
@example(state="k=" + "v" * 600)
@example(state=",".join(f"k{i}={'v' * 200}" for i in range(40)))
@example(state="a=\xe9")
@example(state="a=b\r\nX-Evil: 1")
def test_any_tracestate_leaves_a_head_of_whole_lines(tracer: OtlpTracer, state: str) -> None:
    span = tracer.request("request", {"traceparent": PARENT, "tracestate": state}).child("attempt")
    assert HEAD.fullmatch(span.headers()), span.headers()
    assert span.headers().startswith(b"traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-")


@given(parent=st.text(st.characters(max_codepoint=255), max_size=80))
@example(parent="")
@example(parent=PARENT.upper())
@example(parent="00-" + "0" * 32 + "-" + "0" * 16 + "-01")
@example(parent="ff" + PARENT[2:])
def test_a_traceparent_that_is_none_begins_a_trace(tracer: OtlpTracer, parent: str) -> None:
    span = tracer.request("request", {"traceparent": parent})
    assert span.recording and HEAD.fullmatch(span.headers())
    assert not tracer.remote({"traceparent": parent}).recording


def test_the_state_of_a_trace_is_passed_on(tracer: OtlpTracer) -> None:
    headers = {"traceparent": PARENT, "tracestate": "a=1,b=2"}
    assert b"tracestate: a=1,b=2\r\n" in tracer.request("request", headers).headers()


def test_what_clients_send_does_not_fill_the_log(tracer: OtlpTracer, caplog: pytest.LogCaptureFixture) -> None:
    tracer.request("request", {"traceparent": PARENT * 20, "tracestate": "a=1," * 3000})
    tracer.remote({"traceparent": PARENT, "tracestate": "a=1," * 3000})
    assert not caplog.records
