"""/v1/responses, stateless: a body in terms of a chat, and the answer as output items and their events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from secrets import token_hex
from typing import Any

from pydantic import BaseModel

from ..errors import InvalidRequest, RequestError
from ..request import GenerateRequest, TokenLogprobs
from .as_sent import Note, move, only
from .bodies import least_written
from .messages import few_tools
from .output import Delta
from .problems import MAX_NAME, fields_at, object_at
from .sse import Answer, Format, More, Usage
from .tool_formats.base import ToolCall, collect

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "background": (False,),
    "conversation": (),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "store": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Not implemented, with the values that ask for nothing: no response is kept."""
_INCLUDED = ("reasoning.encrypted_content",)
"""What `include` may ask for: there is none of it."""
_ITEM = ("type", "id", "status")
"""Fields of any item; the latter two say nothing to a server that keeps nothing."""
MAX_METADATA, MAX_METADATA_NAME, MAX_METADATA_TEXT = 16, 64, 512
"""Entries of `metadata`, and characters of their names and texts, as OpenAI has them."""
MAX_USER = 512
MAX_REPEATED = 1 << 20
"""Most bytes of a request, as JSON of ASCII, that its answer repeats: it holds them as long as it streams, and a
stream tells them three times."""


class ResponsesRequest(BaseModel):
    """POST /v1/responses. Other parameters are those of /v1/chat/completions, with the same names."""

    input: str | list[dict[str, Any]]
    model: str = ""
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    stream: bool | None = None


class Response(BaseModel):
    """Answer of /v1/responses."""

    id: str
    object: str
    status: str
    output: list[dict[str, Any]]
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    """Both only with return_token_ids; in a stream in its last event."""


def as_chat(data: Mapping[str, Any], note: Note) -> dict[str, Any]:
    """The body of a chat that asks for the same; `note` is told what comes from where. InvalidRequest names the
    parameter as the client knows it."""
    given = {name: value for name, value in data.items() if value is not None}
    for name, accepted in _NEUTRAL.items():
        if name in given and given.pop(name) not in accepted:
            raise InvalidRequest(f"{name}: not supported, for no response is kept; remove it", param=name)
    if "messages" in given:
        raise InvalidRequest("messages: unknown parameter; give input", param="messages")
    for item in _list(given.pop("include", []), "include"):
        if item not in _INCLUDED:
            raise InvalidRequest(f"include: {item!r} is not supported; remove it", param="include")
    messages: list[dict[str, Any]] = []
    note("messages", "input")
    if "instructions" in given:
        messages.append({"role": "system", "content": _text(given.pop("instructions"), "instructions")})
        note("messages[0]", "instructions")
    _add_messages(messages, given.pop("input", None), note)
    given["messages"] = messages
    if "tools" in given:
        tools = few_tools(_list(given["tools"], "tools"))
        given["tools"] = [_tool(t, f"tools[{i}]", note) for i, t in enumerate(tools)]
    if "tool_choice" in given:
        given["tool_choice"] = _choice(given["tool_choice"])
    if "max_output_tokens" in given:
        only(given, "max_output_tokens", "max_completion_tokens")
        move(given, "max_output_tokens", "max_tokens", note)
    if "text" in given:
        text = fields_at(given.pop("text"), "text", ("format",), {"verbosity": ("medium",)})
        if "format" in text:
            only(given, "text.format", "response_format", "structured_outputs")
            given["response_format"] = _structure(text["format"], note)
    if "reasoning" in given:
        # No summary is made of it: it is told as it is.
        neutral = {"summary": ("auto",), "generate_summary": ("auto",)}
        reasoning = fields_at(given.pop("reasoning"), "reasoning", ("effort",), neutral)
        if "effort" in reasoning:
            only(given, "reasoning.effort", "reasoning_effort")
            given["reasoning_effort"] = reasoning["effort"]
            note("reasoning_effort", "reasoning.effort")
    _check_hints(given)
    # The usage is always told.
    told = {"include_obfuscation": (False,), "include_usage": (True,)}
    fields_at(given.pop("stream_options", {}), "stream_options", (), told)
    return given


def _check_hints(given: Mapping[str, Any]) -> None:
    """What has no effect on the answer, but is repeated in it."""
    metadata = object_at(given.get("metadata", {}), "metadata")
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest(f"metadata: has more than {MAX_METADATA} entries", param="metadata")
    for name, text in metadata.items():
        if len(name) > MAX_METADATA_NAME or not isinstance(text, str) or len(text) > MAX_METADATA_TEXT:
            raise InvalidRequest(
                f"metadata.{name[:MAX_NAME]}: must be a text of at most {MAX_METADATA_TEXT} characters, with a name of "
                f"at most {MAX_METADATA_NAME}",
                param="metadata",
            )
    if len(_text(given.get("user", ""), "user")) > MAX_USER:
        raise InvalidRequest(f"user: has more than {MAX_USER} characters", param="user")


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{name}: must be a list", param=name)
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name}: must be a string", param=name)
    return value


def _tool(tool: Any, path: str, note: Note) -> dict[str, Any]:
    tool = dict(object_at(tool, path))
    if tool.pop("type", None) != "function":
        raise InvalidRequest(f"{path}.type: only function is supported", param=f"{path}.type")
    note(f"{path}.function", path)
    return {"type": "function", "function": tool}


def _choice(choice: Any) -> Any:
    if choice in ("none", "auto", "required"):
        return choice
    if not isinstance(choice, dict):
        raise InvalidRequest(
            'tool_choice: must be none, auto, required or {"type": "function", "name": ...}', param="tool_choice"
        )
    called = fields_at(choice, "tool_choice", ("type", "name"))
    if called.get("type") != "function":
        raise InvalidRequest("tool_choice.type: only function is supported", param="tool_choice.type")
    return {"type": "function", "function": {"name": _text(called.get("name"), "tool_choice.name")}}


def _structure(value: Any, note: Note) -> dict[str, Any]:
    form = dict(object_at(value, "text.format"))
    note("response_format", "text.format")
    if form.get("type") != "json_schema":
        return form
    kind = form.pop("type")
    note("response_format.json_schema.json_schema", "text.format")
    return {"type": kind, kind: form}


def _add_messages(messages: list[dict[str, Any]], value: Any, note: Note) -> None:
    if isinstance(value, str):
        note(f"messages[{len(messages)}]", "input")
        messages.append({"role": "user", "content": value})
        return
    if not isinstance(value, list) or not value:
        raise InvalidRequest("input: must be a string or a list of items, not empty", param="input")
    for i, item in enumerate(value):
        path, at = f"input[{i}]", f"messages[{len(messages)}]"
        kind = object_at(item, path).get("type", "message")
        if kind == "message":
            fields_at(item, path, (*_ITEM, "role", "content"))
            content = item.get("content")
            if isinstance(content, list):
                content = [_part(p, f"{path}.content[{j}]") for j, p in enumerate(content)]
            said = messages[-1] if messages and item.get("role") == "assistant" else {}
            if "tool_calls" in said and isinstance(content, str | list):
                _say_beside_calls(said, content, f"messages[{len(messages) - 1}].content", f"{path}.content", note)
                continue
            messages.append({"role": item.get("role"), "content": content})
            note(at, path)
        elif kind == "function_call":
            fields_at(item, path, (*_ITEM, "call_id", "name", "arguments"))
            call = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            calls = messages[-1].setdefault("tool_calls", [])
            at = f"messages[{len(messages) - 1}].tool_calls[{len(calls)}]"
            calls.append(call)
            note(at, path)
            note(f"{at}.id", f"{path}.call_id")
            note(f"{at}.function", path)
        elif kind == "function_call_output":
            output = fields_at(item, path, (*_ITEM, "call_id", "output")).get("output")
            if isinstance(output, list):
                output = [_part(p, f"{path}.output[{j}]") for j, p in enumerate(output)]
            messages.append({"role": "tool", "content": output, "tool_call_id": item.get("call_id")})
            note(f"{at}.content", f"{path}.output")
            note(f"{at}.tool_call_id", f"{path}.call_id")
        elif kind != "reasoning":  # reasoning of earlier turns is for servers that keep it
            raise InvalidRequest(f"{path}.type: {kind!r} is not supported", param=f"{path}.type")


def _say_beside_calls(message: dict[str, Any], content: str | list[Any], at: str, path: str, note: Note) -> None:
    """What is said after calls is of the message that has them: their results have to follow it."""
    if not isinstance(message["content"], list):
        message["content"] = [] if message["content"] is None else [{"type": "text", "text": message["content"]}]
    parts = message["content"]
    if isinstance(content, str):
        note(f"{at}[{len(parts)}]", path)
        parts.append({"type": "text", "text": content})
        return
    for j, part in enumerate(content):
        note(f"{at}[{len(parts)}]", f"{path}[{j}]")
        parts.append(part)


def _part(part: Any, path: str) -> dict[str, Any]:
    kind = object_at(part, path).get("type")
    if kind not in ("input_text", "output_text", "text"):
        raise InvalidRequest(f"{path}.type: {kind!r} is not supported; only text is", param=f"{path}.type")
    # What an earlier answer said beside its text comes back with it, and is none of the conversation.
    fields_at(part, path, ("type", "text", *(("annotations", "logprobs") if kind == "output_text" else ())))
    return {"type": "text", "text": part.get("text")}


class ResponsesFormat(Format):
    """Answers of /v1/responses: one choice, whose reasoning, text and calls are items."""

    keeps_text = True

    def __init__(self, *args: Any, asked: Mapping[str, Any], **kwargs: Any) -> None:
        """`asked`: the body, of which the answer repeats some. Raises InvalidRequest where that is too much."""
        super().__init__(*args, **kwargs)
        _, answer_id, created, model = args
        about = {
            "id": answer_id,
            "object": "response",
            "created_at": created,
            "model": model,
            "error": None,
            "instructions": asked.get("instructions"),
            "max_output_tokens": asked.get("max_output_tokens"),
            "metadata": asked.get("metadata") or {},
            "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (asked.get("reasoning") or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": asked.get("temperature"),
            "text": asked.get("text") or {"format": {"type": "text"}},
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": (asked.get("tools") or []) if asked.get("tool_choice") != "none" else [],
            "top_p": asked.get("top_p"),
            "truncation": "disabled",
            "user": asked.get("user"),
        }
        sizes = {name: least_written(value, MAX_REPEATED) for name, value in about.items()}
        written = {}
        if sum(sizes.values()) <= MAX_REPEATED:
            written = {name: json.dumps(value) for name, value in about.items()}
            sizes = {name: len(text) for name, text in written.items()}
        if sum(sizes.values()) > MAX_REPEATED:
            name = max(sizes, key=lambda name: sizes[name])
            raise InvalidRequest(
                f"{name}: the answer repeats it, and at most {MAX_REPEATED} bytes of a request as JSON; shorten it, or "
                "use /v1/chat/completions",
                param=name,
            )
        self._about = "{" + ", ".join(f'"{name}": {text}' for name, text in written.items())
        """Text of a JSON object that goes on. As objects it would take many times as much."""
        self.repeated = len(self._about)
        self._number = 0
        self._items: list[dict[str, Any]] = []
        """Of a stream: the items so far; the last may be open."""
        self._growing = False
        self._text: list[str] = []
        """Of the open item. Grown within it, all of it would be copied for each token."""
        self._reason = ""

    def whole(self, answers: Iterable[Answer], usage: Usage) -> Iterator[bytes]:
        """A non-streamed answer."""
        (answer,) = answers
        items = [_reasoning(answer.reasoning)] if answer.reasoning else []
        items += [_message(part) if isinstance(part, str) else self._called(part) for part in answer.parts()]
        items = items or [_message("")]
        if items[-1]["type"] != "function_call":  # which is told when it is whole, and never in part
            items[-1]["status"] = _status(answer.finish_reason)
        _, told = self._response(items, answer.finish_reason, usage, answer)
        yield told.encode()

    def first(self, index: int, request: GenerateRequest, prompt_tokens: int) -> bytes:
        """The response, without output yet."""
        self._streamed.prompt.ids = request.prompt_token_ids
        _, begun = self._response([], "", None)
        return self._about_it("created", begun) + self._about_it("in_progress", begun)

    def delta(self, index: int, delta: Delta, logprobs: Sequence[TokenLogprobs], more: More | None) -> bytes:
        """New text, reasoning or calls."""
        self._gather(more)
        data = b""
        if delta.reasoning:
            data += self._grow("reasoning", "response.reasoning_text", delta.reasoning)
        if delta.content:
            data += self._grow("message", "response.output_text", delta.content)
        for call in delta.calls:
            data += self._close_item() + self._call_events(call)
        return data

    def ends_text(self, delta: Delta) -> bool:
        """Whether `delta` ends an item, whose text is told again."""
        if not self._growing:
            return False
        is_text = self._items[-1]["type"] == "message"
        return bool(delta.calls or (delta.reasoning if is_text else delta.content))

    def finish(self, index: int, reason: str, more: More | None, stop: str = "") -> bytes:
        """The last item ends."""
        self._gather(more)
        self._reason = reason
        empty = b"" if self._items else self._grow("message", "response.output_text", "")
        return empty + self._close_item(_status(reason))

    def end(self, usage: Usage, *, tell: bool) -> bytes:
        """The whole response."""
        return self._about_it(*self._response(self._items, self._reason, usage, self._streamed))

    def error(self, error: RequestError) -> bytes:
        """What ends a stream that fails."""
        told = error.to_json()
        return self._event("error", code=error.code, message=error.message, param=error.param, error=told)

    # ----------------------------------------------------------------------------------------------------- internals

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = json.dumps({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return f"event: {kind}\ndata: {data}\n\n".encode()

    def _about_it(self, what: str, response: str) -> bytes:
        """The event of a response as a whole."""
        kind = f"response.{what}"
        head = f'{{"type": "{kind}", "sequence_number": {self._number}, "response": '
        self._number += 1
        return f"event: {kind}\ndata: {head}{response}}}\n\n".encode()

    def _response(
        self, items: list[dict[str, Any]], reason: str, usage: Usage | None, answer: Answer | None = None
    ) -> tuple[str, str]:
        """Its status, and the response as JSON."""
        status = "in_progress" if usage is None else _status(reason)
        told = (
            None
            if usage is None
            else {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            }
        )
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        rest = {"status": status, "incomplete_details": why, "output": items, "usage": told}
        if answer is not None:
            rest |= self._with_ids(answer)
        return status, f"{self._about}, {json.dumps(rest)[1:]}"

    def _grow(self, kind: str, events: str, text: str) -> bytes:
        data = b""
        if not self._growing or self._items[-1]["type"] != kind:
            data += self._close_item()
            item = _message("") if kind == "message" else _reasoning("")
            item["status"] = "in_progress"
            self._items.append(item)
            self._growing = True
            data += self._event("response.output_item.added", output_index=self._place, item={**item, "content": []})
            data += self._event("response.content_part.added", **self._where(item), part=dict(item["content"][0]))
        item = self._items[-1]
        collect(self._text, text)
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return data + (self._event(f"{events}.delta", **self._where(item), delta=text, **logprobs) if text else b"")

    def _close_item(self, status: str = "completed") -> bytes:
        if not self._growing:
            return b""
        self._growing = False
        item = self._items[-1]
        item["status"] = status
        part = item["content"][0]
        part["text"], self._text = "".join(self._text), []
        events = "response.output_text" if item["type"] == "message" else "response.reasoning_text"
        logprobs: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        return (
            self._event(f"{events}.done", **self._where(item), text=part["text"], **logprobs)
            + self._event("response.content_part.done", **self._where(item), part=part)
            + self._event("response.output_item.done", output_index=self._place, item=item)
        )

    def _call_events(self, call: ToolCall) -> bytes:
        item = self._called(call)
        self._items.append(item)
        where = {"item_id": item["id"], "output_index": self._place}
        begun = {**item, "arguments": "", "status": "in_progress"}
        done = "response.function_call_arguments.done"
        return (
            self._event("response.output_item.added", output_index=self._place, item=begun)
            + self._event("response.function_call_arguments.delta", **where, delta=call.arguments)
            + self._event(done, **where, name=call.name, arguments=call.arguments)
            + self._event("response.output_item.done", output_index=self._place, item=item)
        )

    @property
    def _place(self) -> int:
        return len(self._items) - 1

    def _where(self, item: Mapping[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": self._place, "content_index": 0}

    def _called(self, call: ToolCall) -> dict[str, Any]:
        return {
            "id": f"fc_{token_hex(12)}",
            "type": "function_call",
            "call_id": self._call_id(),
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }


def _status(reason: str) -> str:
    """Of what has ended for that reason: the response, and what it was about to say."""
    return "incomplete" if reason == "length" else "completed"


def _message(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "id": f"msg_{token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def _reasoning(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{token_hex(12)}", "type": "reasoning", "summary": [], "status": "completed", "content": content}
