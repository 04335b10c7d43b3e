"""Answer bodies: server-sent events of a stream, and whole answers. Field order and nulls follow OpenAI's.

A chunk is put together from prepared bytes, since this is done once per token; only its text goes through json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from typing import Any

from ..errors import RequestError
from ..request import TokenLogprobs
from .pieces import Pieces

DONE = b"data: [DONE]\n\n"
_LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot carry."""


@dataclass(slots=True)
class Usage:
    """Token counts of a whole request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def to_json(self) -> str:
        """OpenAI's usage object."""
        return (
            f'{{"prompt_tokens":{self.prompt_tokens},"completion_tokens":{self.completion_tokens},'
            f'"total_tokens":{self.prompt_tokens + self.completion_tokens},'
            f'"prompt_tokens_details":{{"cached_tokens":{self.cached_tokens}}}}}'
        )


@dataclass(slots=True)
class Answer:
    """One finished choice."""

    text: str = ""
    finish_reason: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)


def error_event(error: RequestError) -> bytes:
    """An error after the first byte. OpenAI's client raises APIError; [DONE] releases readers that wait for it."""
    return b"data: " + json.dumps({"error": error.to_json()}).encode() + b"\n\n" + DONE


class _Format:
    """Shared parts of both endpoints' answers to one request."""

    object_name = ""
    chunk_name = ""

    def __init__(
        self, pieces: Pieces, answer_id: str, created: int, model: str, *, logprobs: int, include_usage: bool
    ) -> None:
        self._pieces = pieces
        self._logprobs = logprobs
        name = encode_basestring_ascii(model)
        self._head = f'{{"id":"{answer_id}","object":"{self.object_name}","created":{created},"model":{name}'
        head = f'{{"id":"{answer_id}","object":"{self.chunk_name}","created":{created},"model":{name}'
        self._open = f'data: {head},"choices":[{{"index":'
        self._close = ("}]" + (',"usage":null' if include_usage else "") + "}\n\n").encode()
        self._usage_open = f'data: {head},"choices":[],"usage":'
        self._text_offsets: dict[int, int] = {}

    def first(self, index: int) -> bytes:
        """What opens a choice, before any text."""
        raise AssertionError("defined by both formats")

    def text(self, index: int, text: str, logprobs: Sequence[TokenLogprobs]) -> bytes:
        """A chunk with new text."""
        raise AssertionError("defined by both formats")

    def finish(self, index: int, reason: str) -> bytes:
        """The one chunk that ends a choice."""
        raise AssertionError("defined by both formats")

    def usage(self, usage: Usage) -> bytes:
        """The chunk after all choices, when `stream_options.include_usage` asks for it."""
        return f"{self._usage_open}{usage.to_json()}}}\n\n".encode()

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """A non-streamed answer."""
        choices = ",".join([self._choice(i, a) for i, a in enumerate(answers)])
        return f'{self._head},"choices":[{choices}],"usage":{usage.to_json()}}}'.encode()

    def _choice(self, index: int, answer: Answer) -> str:
        raise AssertionError("defined by both formats")

    def _logprob_json(self, index: int, entries: Sequence[TokenLogprobs]) -> str:
        if self._logprobs < 0:
            return "null"
        return json.dumps(self._logprobs_of(index, entries))

    def _logprobs_of(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        raise AssertionError("defined by both formats")


class ChatFormat(_Format):
    """Answers of /v1/chat/completions."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def first(self, index: int) -> bytes:
        """The role."""
        delta = f'{self._open}{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null'
        return delta.encode() + self._close

    def text(self, index: int, text: str, logprobs: Sequence[TokenLogprobs]) -> bytes:
        """New text."""
        delta = f'{self._open}{index},"delta":{{"content":{encode_basestring_ascii(text)}}},"logprobs":'
        return f'{delta}{self._logprob_json(index, logprobs)},"finish_reason":null'.encode() + self._close

    def finish(self, index: int, reason: str) -> bytes:
        """The end."""
        return f'{self._open}{index},"delta":{{}},"logprobs":null,"finish_reason":"{reason}"'.encode() + self._close

    def _choice(self, index: int, answer: Answer) -> str:
        text = encode_basestring_ascii(answer.text)
        return (
            f'{{"index":{index},"message":{{"role":"assistant","content":{text},"refusal":null}},'
            f'"logprobs":{self._logprob_json(index, answer.logprobs)},"finish_reason":"{answer.finish_reason}"}}'
        )

    def _logprobs_of(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        shown = self._pieces.shown
        content = []
        for entry in entries:
            token, raw = shown(entry.token_id)
            top = []
            for token_id, logprob in entry.top[: self._logprobs]:
                other, other_raw = shown(token_id)
                top.append({"token": other, "logprob": max(logprob, _LOWEST_LOGPROB), "bytes": other_raw})
            logprob = max(entry.logprob, _LOWEST_LOGPROB)
            content.append({"token": token, "logprob": logprob, "bytes": raw, "top_logprobs": top})
        return {"content": content, "refusal": None}


class CompletionFormat(_Format):
    """Answers of /v1/completions."""

    object_name = chunk_name = "text_completion"

    def first(self, index: int) -> bytes:
        """Nothing: a completion has no role."""
        return b""

    def text(self, index: int, text: str, logprobs: Sequence[TokenLogprobs]) -> bytes:
        """New text."""
        body = f'{self._open}{index},"text":{encode_basestring_ascii(text)},"logprobs":'
        return f'{body}{self._logprob_json(index, logprobs)},"finish_reason":null'.encode() + self._close

    def finish(self, index: int, reason: str) -> bytes:
        """The end."""
        return f'{self._open}{index},"text":"","logprobs":null,"finish_reason":"{reason}"'.encode() + self._close

    def _choice(self, index: int, answer: Answer) -> str:
        return (
            f'{{"index":{index},"text":{encode_basestring_ascii(answer.text)},'
            f'"logprobs":{self._logprob_json(index, answer.logprobs)},"finish_reason":"{answer.finish_reason}"}}'
        )

    def _logprobs_of(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        shown = self._pieces.shown
        offset = self._text_offsets.get(index, 0)
        tokens, logprobs, tops, offsets = [], [], [], []
        for entry in entries:
            token, raw = shown(entry.token_id)
            tokens.append(token)
            logprobs.append(max(entry.logprob, _LOWEST_LOGPROB))
            # Different tokens may look alike (incomplete characters): the likeliest keeps the name.
            top: dict[str, float] = {}
            for token_id, logprob in entry.top[: self._logprobs]:
                top.setdefault(shown(token_id)[0], max(logprob, _LOWEST_LOGPROB))
            top.setdefault(token, logprobs[-1])
            tops.append(top)
            offsets.append(offset)
            offset += 0 if raw is None else len(token)
        self._text_offsets[index] = offset
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
