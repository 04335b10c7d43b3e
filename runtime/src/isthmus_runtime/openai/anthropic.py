"""/v1/messages, Anthropic's format: a body in terms of a chat, and the answer as content blocks and their events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from secrets import token_hex
from typing import Any

from pydantic import BaseModel, Field

from ..errors import InvalidRequest, RequestError
from ..request import GenerateRequest, TokenLogprobs
from .as_sent import Note, move, only
from .messages import few_tools
from .output import Delta
from .problems import fields_at, object_at
from .sse import Answer, Format, More, Usage
from .tool_formats.base import ToolCall

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
_NEUTRAL: Mapping[str, tuple[object, ...]] = {"container": (), "mcp_servers": ([],), "context_management": ()}
_BLOCK = ("type", "cache_control")
"""Fields of any block; prefixes are cached without being told."""
_TEXT_BLOCK: Mapping[str, tuple[object, ...]] = {"citations": ([],)}
_ENDS = frozenset({"add_generation_prompt", "continue_final_message"})
"""Parameters that say how the prompt ends."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STATELESS = {"error_code": "thread_unsupported_request", "unsupported": []}
"""Beside the error of `thread`: their client's loops over tools go on without one when they read it."""


class _NoThread(InvalidRequest):
    """The client asks for a conversation that the server keeps."""


class MessagesRequest(BaseModel):
    """POST /v1/messages. Other parameters are those of /v1/chat/completions, with the same names."""

    model: str = ""
    max_tokens: int = Field(ge=1)
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    """`format`, a schema for the answer, and `effort`."""
    cache_control: dict[str, Any] | None = None
    """Without effect, as in blocks."""
    stream: bool | None = None


class CountRequest(MessagesRequest):
    """POST /v1/messages/count_tokens."""

    max_tokens: int | None = Field(default=None, ge=1)  # type: ignore[assignment]


class AnthropicMessage(BaseModel):
    """Answer of /v1/messages."""

    id: str
    type: str
    role: str
    content: list[dict[str, Any]]
    stop_reason: str
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    """Both only with return_token_ids; in a stream with message_delta."""


class TokenCount(BaseModel):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int


def as_chat(data: Mapping[str, Any], note: Note, *, counting: bool = False) -> dict[str, Any]:
    """The body of a chat that asks for the same; `note` is told what comes from where. InvalidRequest names the
    parameter as the client knows it. `counting`: max_tokens may be missing."""
    given = {name: value for name, value in data.items() if value is not None}
    for name, accepted in _NEUTRAL.items():
        if name in given and given.pop(name) not in accepted:
            raise InvalidRequest(f"{name}: not supported; remove it", param=name)
    if "thread" in given:
        raise _NoThread("thread: not supported, for no conversation is kept; send all messages", param="thread")
    object_at(given.pop("cache_control", {}), "cache_control")
    if "max_tokens" not in given and not counting:
        raise InvalidRequest("max_tokens: required", param="max_tokens")
    messages: list[dict[str, Any]] = []
    if "system" in given:
        messages.append({"role": "system", "content": _text(given.pop("system"), "system")})
        note("messages[0]", "system")
    items = given.get("messages")
    if not isinstance(items, list) or not items:
        raise InvalidRequest("messages: must be a list with at least one message", param="messages")
    for i, item in enumerate(items):
        messages += _messages(item, f"messages[{i}]", len(messages), note)
    given["messages"] = messages
    last = messages[-1]
    if last["role"] == "assistant" and "tool_calls" not in last and _ENDS.isdisjoint(given):
        given["continue_final_message"] = True  # what the answer begins with
    move(given, "stop_sequences", "stop", note)
    if "tools" in given:
        tools = given["tools"]
        if not isinstance(tools, list):
            raise InvalidRequest("tools: must be a list", param="tools")
        given["tools"] = [_tool(t, f"tools[{i}]", note) for i, t in enumerate(few_tools(tools))]
    if "tool_choice" in given:
        given.update(_choice(object_at(given.pop("tool_choice"), "tool_choice")))
    config = fields_at(given.pop("output_config", {}), "output_config", ("effort", "format"))
    if "format" in config:
        only(given, "output_config.format", "response_format", "structured_outputs")
        given["response_format"] = _structure(config["format"], note)
    effort = config.get("effort")
    if effort is not None:
        only(given, "output_config.effort", "reasoning_effort")
    if "thinking" in given:
        # A budget is a wish: Anthropic's own may be exceeded, and the client demands one.
        thinking = fields_at(given.pop("thinking"), "thinking", ("type", "budget_tokens"), {"display": ("summarized",)})
        kind = thinking.get("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise InvalidRequest(f"thinking.type: {kind!r} is not supported", param="thinking.type")
        only(given, "thinking", "reasoning_effort")
        note("reasoning_effort", "thinking")
        given["reasoning_effort"] = "none" if kind == "disabled" else "medium"
    if effort is not None and given.get("reasoning_effort") != "none":
        note("reasoning_effort", "output_config.effort")
        given["reasoning_effort"] = effort
    return given


def _structure(value: Any, note: Note) -> dict[str, Any]:
    path = "output_config.format"
    form = fields_at(value, path, ("type", "schema"))
    if (kind := form.pop("type", None)) != "json_schema":
        raise InvalidRequest(f"{path}.type: {kind!r} is not supported; only json_schema is", param=f"{path}.type")
    note("response_format", path)
    note("response_format.json_schema.json_schema", path)
    return {"type": kind, kind: {"name": "answer", **form}}


def _text(value: Any, path: str) -> str:
    """Text, or text blocks joined by newlines; `cache_control` is a hint."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(f"{path}: must be a string or a list of text blocks", param=path)
    return "\n".join(_text_block(block, f"{path}[{i}]") for i, block in enumerate(value))


def _text_block(block: Any, path: str) -> str:
    if (kind := object_at(block, path).get("type")) != "text":
        raise InvalidRequest(f"{path}.type: {kind!r} is not supported; only text is", param=f"{path}.type")
    text = block.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}.text: must be a string", param=f"{path}.text")
    fields_at(block, path, (*_BLOCK, "text"), _TEXT_BLOCK)
    return text


def _messages(item: Any, path: str, before: int, note: Note) -> list[dict[str, Any]]:
    """One message of theirs, with so many of ours `before` it: the results of tools in it are messages of their own,
    and come first."""
    role = object_at(item, path).get("role")
    if role not in ("user", "assistant"):
        raise InvalidRequest(
            f"{path}.role: {role!r} is not supported; supported: user, assistant", param=f"{path}.role"
        )
    content = fields_at(item, path, ("role", "content")).get("content")
    if isinstance(content, str):
        note(f"messages[{before}]", path)
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise InvalidRequest(f"{path}.content: must be a string or a list of blocks", param=f"{path}.content")
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for i, block in enumerate(content):
        where = f"{path}.content[{i}]"
        kind = object_at(block, where).get("type")
        if kind == "text":
            texts.append(_text_block(block, where))
        elif kind == "tool_use" and role == "assistant":
            fields_at(block, where, (*_BLOCK, "id", "name", "input"))
            function = {"name": block.get("name"), "arguments": block.get("input")}
            at = f"messages[{before}].tool_calls[{len(calls)}]"
            calls.append({"id": block.get("id"), "type": "function", "function": function})
            note(at, where)
            note(f"{at}.function", where)
            note(f"{at}.function.arguments", f"{where}.input")
        elif kind == "tool_result" and role == "user":
            result = fields_at(block, where, (*_BLOCK, "tool_use_id", "content", "is_error"))
            text = _text(result.get("content", ""), f"{where}.content")
            if result.get("is_error"):
                text = f"Error: {text}"  # templates know no other way to tell
            note(f"messages[{before + len(results)}]", where)
            note(f"messages[{before + len(results)}].tool_call_id", f"{where}.tool_use_id")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind == "thinking" and role == "assistant":
            thought = fields_at(block, where, ("type", "thinking", "signature")).get("thinking", "")
            if not isinstance(thought, str):
                raise InvalidRequest(f"{where}.thinking: must be a string", param=f"{where}.thinking")
            thoughts.append(thought)
        elif kind != "redacted_thinking":
            raise InvalidRequest(f"{where}.type: {kind!r} is not supported here", param=f"{where}.type")
    message: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    # Results are of the user, calls of the assistant: no message of theirs has both.
    note(f"messages[{before + len(results)}]", path)
    return [*results, message] if texts or calls or not results else results


def _tool(tool: Any, path: str, note: Note) -> dict[str, Any]:
    if object_at(tool, path).get("type") not in (None, "custom"):
        raise InvalidRequest(f"{path}.type: only tools of your own are supported", param=f"{path}.type")
    fields_at(tool, path, (*_BLOCK, "name", "description", "input_schema", "strict"))
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
        "strict": tool.get("strict"),
    }
    note(f"{path}.function", path)
    note(f"{path}.function.parameters", f"{path}.input_schema")
    return {"type": "function", "function": function}


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    if kind != "tool" and (not isinstance(kind, str) or kind not in _CHOICES):
        raise InvalidRequest(f"tool_choice.type: {kind!r} is not supported", param="tool_choice.type")
    fields_at(choice, "tool_choice", ("type", "disable_parallel_tool_use", *(("name",) if kind == "tool" else ())))
    parallel = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    if kind == "tool":
        if not isinstance(choice.get("name"), str):
            raise InvalidRequest("tool_choice.name: must be a string", param="tool_choice.name")
        return {"tool_choice": {"type": "function", "function": {"name": choice.get("name")}}, **parallel}
    return {"tool_choice": _CHOICES[kind], **parallel}


def error_body(error: RequestError) -> dict[str, Any]:
    """An error in their form. Where it is known, the stage and the attempt are beside it."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    kind = "overloaded_error" if error.status == 503 else kind
    details = {"details": _STATELESS} if isinstance(error, _NoThread) else {}
    return {"type": "error", "error": {**error.to_json(), "type": kind, **details}}


class AnthropicFormat(Format):
    """Answers of /v1/messages: one choice, whose reasoning, text and calls are blocks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _, answer_id, _, model = args
        self._about = {"id": answer_id, "type": "message", "role": "assistant", "model": model}
        self._blocks = 0
        self._kind = ""
        """Of the block that is open."""
        self._ended: dict[str, Any] = {}

    def whole(self, answers: Iterable[Answer], usage: Usage) -> Iterator[bytes]:
        """A non-streamed answer."""
        (answer,) = answers
        content: list[dict[str, Any]] = []
        if answer.reasoning:
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        for part in answer.parts():
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            else:
                content.append({**self._use(part), "input": json.loads(part.arguments)})
        ended = _ended(answer.finish_reason, answer.stop)
        told = {**self._about, "content": content, **ended, "usage": _usage(usage), **self._with_ids(answer)}
        yield json.dumps(told).encode()

    def first(self, index: int, request: GenerateRequest, prompt_tokens: int) -> bytes:
        """The message, without content yet."""
        self._streamed.prompt.ids = request.prompt_token_ids
        usage = _usage(Usage(prompt_tokens))
        message = {**self._about, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message=message)

    def delta(self, index: int, delta: Delta, logprobs: Sequence[TokenLogprobs], more: More | None) -> bytes:
        """New text, reasoning or calls."""
        self._gather(more)
        data = b""
        if delta.reasoning:
            thought = {"type": "thinking", "thinking": "", "signature": ""}
            data += self._grow(thought, {"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            data += self._grow({"type": "text", "text": ""}, {"type": "text_delta", "text": delta.content})
        for call in delta.calls:
            data += self._close_block()
            block: dict[str, Any] = {**self._use(call), "input": {}}
            data += self._grow(block, {"type": "input_json_delta", "partial_json": call.arguments})
            data += self._close_block()
        return data

    def finish(self, index: int, reason: str, more: More | None, stop: str = "") -> bytes:
        """The last block ends."""
        self._gather(more)
        self._ended = _ended(reason, stop)
        return self._close_block()

    def end(self, usage: Usage, *, tell: bool) -> bytes:
        """Why it ended, and the usage."""
        ids = self._with_ids(self._streamed)
        return _event("message_delta", delta=self._ended, usage=_usage(usage), **ids) + _event("message_stop")

    def error(self, error: RequestError) -> bytes:
        """What ends a stream that fails."""
        return f"event: error\ndata: {json.dumps(error_body(error))}\n\n".encode()

    def _use(self, call: ToolCall) -> dict[str, Any]:
        return {"type": "tool_use", "id": f"toolu_{token_hex(12)}", "name": call.name}

    def _grow(self, block: dict[str, Any], delta: dict[str, Any]) -> bytes:
        data = b""
        if self._kind != block["type"]:
            data += self._close_block()
            self._kind = block["type"]
            data += _event("content_block_start", index=self._blocks, content_block=block)
        return data + _event("content_block_delta", index=self._blocks, delta=delta)

    def _close_block(self) -> bytes:
        if not self._kind:
            return b""
        self._kind = ""
        self._blocks += 1
        return _event("content_block_stop", index=self._blocks - 1)


def _ended(reason: str, stop: str) -> dict[str, Any]:
    if stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": _REASONS[reason], "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()
