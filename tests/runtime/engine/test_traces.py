"""The spans of an engine by what happened to a request, and what is not recorded."""

from __future__ import annotations

import pytest

from isthmus_runtime.engine.traces import RequestTrace, StartTimes
from isthmus_runtime.errors import EngineFailed
from isthmus_runtime.interfaces.steps import RowStart
from isthmus_runtime.protocol.calls import PrefillAnswer
from isthmus_runtime.request import FinishReason, GenerateRequest, SamplingParams, TokenChunk
from isthmus_runtime.tracing.span import NO_SPAN, NO_TRACER, current, within

REQUEST = GenerateRequest(request_id="r", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=4))


class Recorded:
    """A span that keeps what it is told."""

    recording = True

    def __init__(self, clock, name="", at=None, attributes=None):
        self.clock, self.name, self.begun = clock, name, at
        self.attributes = dict(attributes or {})
        self.ended, self.error, self.children = None, None, []

    def child(self, name, attributes=None, *, at=None):
        made = Recorded(self.clock, name, self.clock() if at is None else at, attributes)
        self.children.append(made)
        return made

    def set(self, attributes):
        self.attributes |= attributes

    def fail(self, error):
        self.error = error

    def end(self, at=None):
        self.ended = self.clock() if at is None else at


class World:
    def __init__(self):
        self.now = 10.0
        self.parent = Recorded(lambda: self.now)
        self.starts = StartTimes(lambda: self.now)
        self.trace = RequestTrace(self.parent, self.starts, "sid", REQUEST)

    def at(self, now):
        self.now = now
        return self

    def start(self):
        self.starts.started([RowStart(0, "sid", (1, 2, 3), 3, ((1,),), REQUEST.sampling)])

    def spans(self):
        return [(s.name, s.begun, s.ended) for s in self.parent.children]


def test_a_prompt_computed_here():
    world = World()
    world.at(11.0).start()
    world.at(12.0).start()  # again after a preemption: it waited until the first time
    world.at(13.0).trace.chunk(TokenChunk((5,), note="local", cached_tokens=2))
    world.at(15.0).trace.chunk(TokenChunk((6,), finish_reason=FinishReason.LENGTH))
    world.trace.close()
    assert world.spans() == [("queue", 10, 11), ("prefill", 11, 13), ("decode", 13, 15)]
    _, prefill, decode = world.parent.children
    assert prefill.attributes["gen_ai.usage.cache_read.input_tokens"] == 2
    assert decode.attributes["gen_ai.usage.output_tokens"] == 2
    assert decode.attributes["gen_ai.response.finish_reasons"] == ("length",)


def test_kv_that_came_and_kv_that_did_not():
    world = World()
    world.at(11.0).trace.reserved()
    world.at(14.0).trace.chunk(TokenChunk((5,), note="transferred"))
    world.at(15.0).trace.chunk(TokenChunk((6,), finish_reason=FinishReason.STOP))
    assert world.spans() == [("queue", 10, 11), ("transfer", 11, 14), ("decode", 14, 15)]

    world = World()
    world.at(11.0).trace.reserved()
    world.at(12.0).start()
    world.at(14.0).trace.chunk(TokenChunk((5,), finish_reason=FinishReason.LENGTH, note="recomputed"))
    assert world.spans() == [("queue", 10, 11), ("transfer", 11, 12), ("prefill", 12, 14), ("decode", 14, 14)]
    assert world.parent.children[1].attributes["isthmus.kv.source"] == "recomputed"


def test_a_prompt_that_is_sent():
    world = World()
    world.at(11.0).start()
    answer = PrefillAnswer(attempt="a", num_tokens=3, sent_bytes=7, transfer_s=0.5)
    world.at(14.0).trace.sent(answer)
    world.trace.close()
    assert world.spans() == [("queue", 10, 11), ("prefill", 11, 13.5), ("transfer", 13.5, 14)]
    assert world.parent.children[2].attributes["isthmus.transfer.bytes"] == 7


@pytest.mark.parametrize(("until", "name"), [("arrived", "queue"), ("started", "prefill"), ("reserved", "transfer")])
def test_what_ended_before_its_first_token_says_in_which_part(until, name):
    world = World()
    world.now = 11.0
    if until == "started":
        world.start()
    if until == "reserved":
        world.trace.reserved()
    error = EngineFailed("broken")
    world.at(12.0).trace.chunk(TokenChunk(finish_reason=FinishReason.ERROR, error=error))
    world.trace.close()
    last = world.parent.children[-1]
    assert (last.name, last.error, last.ended) == (name, error, 12.0)


def test_a_client_that_leaves_ends_the_span():
    world = World()
    world.at(11.0).start()
    world.trace.chunk(TokenChunk((5,)))
    world.at(13.0).trace.close()
    assert world.spans()[-1] == ("decode", 11, 13)
    assert world.starts.of("sid") is None and not world.starts._times


def test_without_tracing_there_is_one_span_that_does_nothing():
    span = NO_TRACER.request("request", {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"})
    assert span is NO_SPAN and span.child("x") is NO_SPAN and span.headers() == b"" and not span.recording
    with within(span) as found:
        assert found is NO_SPAN and current() is NO_SPAN
