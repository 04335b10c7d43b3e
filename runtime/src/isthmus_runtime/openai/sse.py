"""Answer bodies: server-sent events of a stream, and whole answers. Field order and nulls follow OpenAI's.

A chunk is put together from prepared bytes, since this is done once per token; only its text goes through json.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from json.encoder import encode_basestring_ascii
from secrets import token_hex
from typing import Any, NamedTuple

from ..errors import RequestError
from ..request import GenerateRequest, TokenLogprobs
from .output import Delta
from .pieces import Pieces
from .prompts import LOWEST_LOGPROB, Told, by_token_id
from .tool_formats.base import ToolCall

TOOL_CALLS = "tool_calls"
"""The finish reason of an answer that stopped for its calls."""
DONE = b"data: [DONE]\n\n"


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


class More(NamedTuple):
    """What a chunk tells beside its text, where the request asks for it."""

    ids: Sequence[int] | None
    usage: Usage | None


@dataclass(slots=True)
class Answer:
    """One finished choice."""

    prompt: Told
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    places: list[int] = field(default_factory=list)
    """For each call, how many characters of the text came before it."""
    ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop: str = ""
    """The stop string that has ended it."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def parts(self) -> Iterator[str | ToolCall]:
        """Text and calls in the order in which they came, as a stream tells them. No text is empty."""
        begin = 0
        for call, end in zip(self.calls, self.places, strict=True):
            if end > begin:
                yield self.text[begin:end]
            yield call
            begin = end
        if begin < len(self.text):
            yield self.text[begin:]


def _json_list(items: Iterable[Any]) -> str:
    """As JSON, an item at a time: the encoder lets no other thread run until it returns, and these may be 60 MiB."""
    return f"[{','.join(map(json.dumps, items))}]"


def error_event(error: RequestError) -> bytes:
    """An error after the first byte. OpenAI's client raises APIError; [DONE] releases readers that wait for it."""
    return b"data: " + json.dumps({"error": error.to_json()}).encode() + b"\n\n" + DONE


class Format:
    """How the answer to one request is written; the base has what both completion endpoints share."""

    object_name = ""
    chunk_name = ""
    keeps_text = False
    """A stream's text is told again at its end, and kept until then."""
    _text_open, _text_close = "", b""
    """What is around the text of a chunk."""
    repeated = 0
    """Bytes of the request that its answer repeats."""

    def __init__(
        self,
        pieces: Pieces,
        answer_id: str,
        created: int,
        model: str,
        *,
        logprobs: int,
        prompt_logprobs: int = -1,
        include_usage: bool,
        return_ids: bool = False,
        short_call_ids: bool = False,
    ) -> None:
        """`logprobs`, `prompt_logprobs`: how many alternatives are told, -1: nothing is; `short_call_ids`: ids of tool
        calls are nine letters and digits."""
        self._pieces = pieces
        self._return_ids = return_ids
        self._short_call_ids = short_call_ids
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs
        name = encode_basestring_ascii(model)
        self._head = f'{{"id":"{answer_id}","object":"{self.object_name}","created":{created},"model":{name}'
        head = f'{{"id":"{answer_id}","object":"{self.chunk_name}","created":{created},"model":{name}'
        self._open = f'data: {head},"choices":[{{"index":'
        self._opened: dict[int, bytes] = {}
        self._close = ("}]" + (',"usage":null' if include_usage else "") + "}\n\n").encode()
        self._usage_open = f'data: {head},"choices":[],"usage":'
        self._text_offsets: dict[int, int] = {}

    @cached_property
    def _streamed(self) -> Answer:
        """The ids of a stream so far, for formats that tell them at its end."""
        return Answer(Told(()))

    def first(self, index: int, request: GenerateRequest, prompt_tokens: int) -> bytes:
        """What opens a choice, before any text."""
        raise AssertionError("defined by each format")

    def echo(self, index: int, prompt: Told) -> bytes:
        """The prompt again, once it is computed, where the request asks for that."""
        return b""

    def delta(self, index: int, delta: Delta, logprobs: Sequence[TokenLogprobs], more: More | None) -> bytes:
        """A chunk with something new."""
        raise AssertionError("defined by each format")

    def ends_text(self, delta: Delta) -> bool:
        """Whether a stream's text, of formats that keep it, is told again with `delta`."""
        return False

    def finish(self, index: int, reason: str, more: More | None, stop: str = "") -> bytes:
        """What ends a choice; `stop`: the stop string that has."""
        raise AssertionError("defined by each format")

    def end(self, usage: Usage, *, tell: bool) -> bytes:
        """After all choices; with `tell` the usage, which `stream_options.include_usage` asks for."""
        told = f"{self._usage_open}{usage.to_json()}}}\n\n".encode() if tell else b""
        return told + DONE

    def error(self, error: RequestError) -> bytes:
        """What ends a stream that fails."""
        return error_event(error)

    def whole(self, answers: Iterable[Answer], usage: Usage) -> Iterator[bytes]:
        """A non-streamed answer, in pieces; of `answers`, at least one, each is needed until the next is asked for."""
        prompt: Told | None = None
        yield f'{self._head},"choices":['.encode()
        for index, answer in enumerate(answers):
            prompt = prompt or answer.prompt
            if index:
                yield b","
            yield self._choice(index, answer).encode()
        assert prompt is not None
        yield f'],"usage":{usage.to_json()}{self._of_prompt(prompt)}}}'.encode()

    def _of_prompt(self, prompt: Told) -> str:
        """What a non-streamed answer tells of the prompt beside its choices, as fields."""
        return ""

    def _choice(self, index: int, answer: Answer) -> str:
        raise AssertionError("defined by each format")

    def _content(self, index: int, content: str) -> bytes:
        """A chunk of new text and nothing else."""
        opened = self._opened.get(index)
        if opened is None:
            opened = self._opened[index] = f"{self._open}{index}{self._text_open}".encode()
        return b"%b%b%b%b" % (opened, encode_basestring_ascii(content).encode(), self._text_close, self._close)

    def _closed(self, more: More | None) -> bytes:
        """What ends a chunk."""
        if more is None:
            return self._close
        ids = "" if more.ids is None else f',"token_ids":{json.dumps(list(more.ids))}'
        usage = "" if more.usage is None else f',"usage":{more.usage.to_json()}'
        return f"{ids}}}]{usage}}}\n\n".encode() if usage else ids.encode() + self._close

    def _scores(self, prompt: Told) -> str:
        """`prompt_logprobs` as a field, where the request asks for it."""
        if self._prompt_logprobs < 0:
            return ""
        return f',"prompt_logprobs":{_json_list(by_token_id(prompt, self._pieces, self._prompt_logprobs))}'

    def _with_ids(self, answer: Answer) -> dict[str, Any]:
        """The ids of prompt and answer as fields, where the request asks for them."""
        return {"prompt_token_ids": list(answer.prompt.ids), "token_ids": answer.ids} if self._return_ids else {}

    def _gather(self, more: More | None) -> None:
        """Note a chunk's ids."""
        if more is not None and more.ids is not None:
            self._streamed.ids += more.ids

    def _call_id(self) -> str:
        return token_hex(8)[:9] if self._short_call_ids else f"call_{token_hex(12)}"

    def _logprob_json(self, index: int, entries: Sequence[TokenLogprobs]) -> str:
        if self._logprobs < 0:
            return "null"
        found = self._logprobs_of(index, entries)
        return "{" + ",".join(f'"{name}":{_json_list(column)}' for name, column in found.items()) + "}"

    def _logprobs_of(self, index: int, entries: Sequence[TokenLogprobs]) -> Mapping[str, Iterable[Any]]:
        """Lists by name."""
        raise AssertionError("defined by each format")


class ChatFormat(Format):
    """Answers of /v1/chat/completions."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    _text_open, _text_close = ',"delta":{"content":', b'},"logprobs":null,"finish_reason":null'

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._calls: dict[int, int] = {}
        """Calls that a choice has made so far."""

    def first(self, index: int, request: GenerateRequest, prompt_tokens: int) -> bytes:
        """The role."""
        delta = f'{self._open}{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null'
        if not self._return_ids:
            return delta.encode() + self._close
        ids = f',"prompt_token_ids":{json.dumps(request.prompt_token_ids)}}}\n\n'
        return delta.encode() + self._close.removesuffix(b"}\n\n") + ids.encode()

    def delta(self, index: int, delta: Delta, logprobs: Sequence[TokenLogprobs], more: More | None) -> bytes:
        """New text, reasoning or calls."""
        if self._logprobs < 0 and more is None and not delta.reasoning and not delta.calls:
            return self._content(index, delta.content)
        inner = f'"content":{encode_basestring_ascii(delta.content)}'
        if delta.reasoning or delta.calls:
            parts = [f'"reasoning_content":{encode_basestring_ascii(delta.reasoning)}'] if delta.reasoning else []
            parts += [inner] if delta.content else []
            if delta.calls:
                begin = self._calls.get(index, 0)
                self._calls[index] = begin + len(delta.calls)
                calls = [self._call(c, f'"index":{begin + i},') for i, c in enumerate(delta.calls)]
                parts.append(f'"tool_calls":[{",".join(calls)}]')
            inner = ",".join(parts)
        told = f'{self._open}{index},"delta":{{{inner}}},"logprobs":'
        return f'{told}{self._logprob_json(index, logprobs)},"finish_reason":null'.encode() + self._closed(more)

    def finish(self, index: int, reason: str, more: More | None, stop: str = "") -> bytes:
        """The end."""
        told = f'{self._open}{index},"delta":{{}},"logprobs":null,"finish_reason":"{reason}"'
        return told.encode() + self._closed(more)

    def _of_prompt(self, prompt: Told) -> str:
        ids = f',"prompt_token_ids":{json.dumps(list(prompt.ids))}' if self._return_ids else ""
        return f"{ids}{self._scores(prompt)}"

    def _call(self, call: ToolCall, index: str = "") -> str:
        name, arguments = encode_basestring_ascii(call.name), encode_basestring_ascii(call.arguments)
        function = f'{{"name":{name},"arguments":{arguments}}}'
        return f'{{{index}"id":"{self._call_id()}","type":"function","function":{function}}}'

    def _choice(self, index: int, answer: Answer) -> str:
        text = "null" if answer.calls and not answer.text else encode_basestring_ascii(answer.text)
        more = f',"tool_calls":[{",".join(map(self._call, answer.calls))}]' if answer.calls else ""
        if answer.reasoning:
            more += f',"reasoning_content":{encode_basestring_ascii(answer.reasoning)}'
        ids = f',"token_ids":{json.dumps(answer.ids)}' if self._return_ids else ""
        return (
            f'{{"index":{index},"message":{{"role":"assistant","content":{text},"refusal":null{more}}},'
            f'"logprobs":{self._logprob_json(index, answer.logprobs)},"finish_reason":"{answer.finish_reason}"{ids}}}'
        )

    def _logprob_json(self, index: int, entries: Sequence[TokenLogprobs]) -> str:
        return f'{{"content":{_json_list(self._told(entries))},"refusal":null}}' if self._logprobs >= 0 else "null"

    def _told(self, entries: Iterable[TokenLogprobs]) -> Iterator[dict[str, Any]]:
        shown = self._pieces.shown
        for entry in entries:
            token, raw = shown(entry.token_id)
            top = []
            for token_id, logprob in entry.top[: self._logprobs]:
                other, other_raw = shown(token_id)
                top.append({"token": other, "logprob": max(LOWEST_LOGPROB, logprob), "bytes": other_raw})
            logprob = max(LOWEST_LOGPROB, entry.logprob)
            yield {"token": token, "logprob": logprob, "bytes": raw, "top_logprobs": top}


class CompletionFormat(Format):
    """Answers of /v1/completions."""

    object_name = chunk_name = "text_completion"
    _text_open, _text_close = ',"text":', b',"logprobs":null,"finish_reason":null'

    def first(self, index: int, request: GenerateRequest, prompt_tokens: int) -> bytes:
        """Nothing, for a completion has no role; the ids of the prompt, where they are asked for."""
        if not self._return_ids:
            return b""
        ids = json.dumps(request.prompt_token_ids)
        told = f'{self._open}{index},"text":"","logprobs":null,"finish_reason":null,"prompt_token_ids":{ids}'
        return told.encode() + self._close

    def echo(self, index: int, prompt: Told) -> bytes:
        """The prompt, with the log-probabilities of its tokens where those of the answer are asked for."""
        if prompt.echo is None:
            return b""
        told = self._with_prompt(index, prompt, ()) if self._logprobs >= 0 else "null"
        text = f'{self._open}{index},"text":{encode_basestring_ascii(prompt.echo.text)},"logprobs":{told}'
        return f'{text},"finish_reason":null'.encode() + self._close

    def delta(self, index: int, delta: Delta, logprobs: Sequence[TokenLogprobs], more: More | None) -> bytes:
        """New text."""
        if self._logprobs < 0 and more is None:
            return self._content(index, delta.content)
        body = f'{self._open}{index},"text":{encode_basestring_ascii(delta.content)},"logprobs":'
        return f'{body}{self._logprob_json(index, logprobs)},"finish_reason":null'.encode() + self._closed(more)

    def finish(self, index: int, reason: str, more: More | None, stop: str = "") -> bytes:
        """The end."""
        told = f'{self._open}{index},"text":"","logprobs":null,"finish_reason":"{reason}"'
        return told.encode() + self._closed(more)

    def _choice(self, index: int, answer: Answer) -> str:
        ids, prompt, text = "", answer.prompt, answer.text
        if self._return_ids:
            ids = f',"token_ids":{json.dumps(answer.ids)},"prompt_token_ids":{json.dumps(list(prompt.ids))}'
        if prompt.echo is None:
            logprobs = self._logprob_json(index, answer.logprobs)
        else:
            text = prompt.echo.text + text
            logprobs = "null" if self._logprobs < 0 else self._with_prompt(index, prompt, answer.logprobs)
        return (
            f'{{"index":{index},"text":{encode_basestring_ascii(text)},"logprobs":{logprobs},'
            f'"finish_reason":"{answer.finish_reason}"{ids}{self._scores(prompt)}}}'
        )

    def _with_prompt(self, index: int, prompt: Told, entries: Sequence[TokenLogprobs]) -> str:
        """The log-probabilities of prompt and answer as JSON. The first token has none: nothing is before it."""
        assert prompt.echo is not None
        of_prompt = self._logprobs_of(index, prompt.scores)
        self._text_offsets[index] = len(prompt.echo.text)
        of_answer = self._logprobs_of(index, entries)
        columns: dict[str, list[Any]] = {
            "tokens": [self._pieces.shown(prompt.ids[0])[0], *of_prompt["tokens"], *of_answer["tokens"]],
            "token_logprobs": [None, *of_prompt["token_logprobs"], *of_answer["token_logprobs"]],
            "top_logprobs": [None, *of_prompt["top_logprobs"], *of_answer["top_logprobs"]],
            "text_offset": [*prompt.echo.offsets, *of_answer["text_offset"]],
        }
        return "{" + ",".join(f'"{name}":{_json_list(column)}' for name, column in columns.items()) + "}"

    def _logprobs_of(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        shown = self._pieces.shown
        offset = self._text_offsets.get(index, 0)
        tokens, logprobs, tops, offsets = [], [], [], []
        for entry in entries:
            token, raw = shown(entry.token_id)
            tokens.append(token)
            logprobs.append(max(LOWEST_LOGPROB, entry.logprob))
            # Different tokens may look alike (incomplete characters): the likeliest keeps the name.
            top: dict[str, float] = {}
            for token_id, logprob in entry.top[: self._logprobs]:
                top.setdefault(shown(token_id)[0], max(LOWEST_LOGPROB, logprob))
            top.setdefault(token, logprobs[-1])
            tops.append(top)
            offsets.append(offset)
            offset += 0 if raw is None else len(token)
        self._text_offsets[index] = offset
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
