"""Every place of a public request at which a client puts something, found by walking the models of the API. Pure.

What the models leave open (`dict[str, Any]`), as the code looks into it by hand, has its shape here. `FREE` is what may
hold any JSON.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from isthmus_runtime.openai.anthropic import CountRequest, MessagesRequest
from isthmus_runtime.openai.embeddings import EmbeddingsRequest
from isthmus_runtime.openai.ranking import RerankRequest, ScoreRequest
from isthmus_runtime.openai.responses import ResponsesRequest
from isthmus_runtime.openai.schema import ChatRequest, CompletionRequest
from isthmus_runtime.openai.tokens import DetokenizeRequest, TokenizeRequest

Path = tuple[str, ...]
ITEM, NAME = "*", "?"
"""In a path: an item of a list, and a value by any name of an object."""
_MANY: dict[str, Any] = {"max_tokens": 1}


@dataclass(frozen=True)
class Endpoint:
    """A route that takes a body."""

    path: str
    model: type[BaseModel]
    task: str
    """What the model has to be served for."""
    base: Mapping[str, Any]
    """The least body."""
    beside: type[BaseModel] | None = None
    """Its parameters are taken as well, but for those that are named otherwise."""


ENDPOINTS = (
    Endpoint(
        "/v1/chat/completions", ChatRequest, "generate", {"messages": [{"role": "user", "content": "hi"}], **_MANY}
    ),
    Endpoint("/v1/completions", CompletionRequest, "generate", {"prompt": "hi", **_MANY}),
    Endpoint("/v1/responses", ResponsesRequest, "generate", {"input": "hi", "max_output_tokens": 1}, ChatRequest),
    Endpoint(
        "/v1/messages",
        MessagesRequest,
        "generate",
        {"messages": [{"role": "user", "content": "hi"}], **_MANY},
        ChatRequest,
    ),
    Endpoint("/v1/messages/count_tokens", CountRequest, "generate", {"messages": [{"role": "user", "content": "hi"}]}),
    Endpoint("/tokenize", TokenizeRequest, "generate", {"prompt": "hi"}),
    Endpoint("/detokenize", DetokenizeRequest, "generate", {"tokens": [1]}),
    Endpoint("/v1/embeddings", EmbeddingsRequest, "embed", {"input": "hi"}),
    Endpoint("/v1/rerank", RerankRequest, "score", {"query": "hi", "documents": ["a"]}),
    Endpoint("/v1/score", ScoreRequest, "score", {"text_1": "hi", "text_2": "a"}),
)

_STRING = {"type": "string"}
_ANY: dict[str, Any] = {}


def _object(required: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    properties = {**required, **more}
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


def _const(value: str) -> dict[str, Any]:
    return {"const": value}


_RESPONSES_TOOL = _object(
    {"type": _const("function"), "name": _STRING}, description=_STRING, parameters=_ANY, strict={"type": "boolean"}
)
_INPUT_PARTS = _list(
    {
        "anyOf": [
            _object({"type": _const("input_text"), "text": _STRING}),
            _object({"type": _const("output_text"), "text": _STRING}, annotations=_ANY, logprobs=_ANY),
        ]
    }
)
_INPUT = _list(
    {
        "anyOf": [
            _object(
                {"role": _const("user"), "content": {"anyOf": [_STRING, _INPUT_PARTS]}}, id=_STRING, status=_STRING
            ),
            _object(
                {"type": _const("function_call"), "name": _STRING, "arguments": {"type": "string", "default": "{}"}},
                call_id=_STRING,
            ),
            _object(
                {"type": _const("function_call_output"), "output": {"anyOf": [_STRING, _INPUT_PARTS]}},
                call_id=_STRING,
            ),
            _object({"type": _const("reasoning")}, summary=_ANY),
        ]
    }
)
_TEXT_BLOCK = _object({"type": _const("text"), "text": _STRING}, cache_control=_ANY, citations={"enum": [[]]})
_TEXT_BLOCKS = _list(_TEXT_BLOCK)
_USERS = _list(
    {
        "anyOf": [
            _TEXT_BLOCK,
            _object(
                {"type": _const("tool_result"), "content": {"anyOf": [_STRING, _TEXT_BLOCKS]}},
                tool_use_id=_STRING,
                is_error={"type": "boolean"},
            ),
        ]
    }
)
_ASSISTANTS = _list(
    {
        "anyOf": [
            _TEXT_BLOCK,
            _object({"type": _const("tool_use"), "name": _STRING, "input": _ANY}, id=_STRING),
            _object({"type": _const("thinking"), "thinking": _STRING}, signature=_STRING),
            _object({"type": _const("redacted_thinking")}, data=_ANY),
        ]
    }
)
_MESSAGES = _list(
    {
        "anyOf": [
            _object({"role": _const("user"), "content": {"anyOf": [_STRING, _USERS]}}),
            _object({"role": _const("assistant"), "content": {"anyOf": [_STRING, _ASSISTANTS]}}),
        ]
    }
)
_ANTHROPIC_TOOL = _object({"name": _STRING, "input_schema": _ANY}, description=_STRING, strict={"type": "boolean"})
_ANTHROPIC = {
    "messages": _MESSAGES,
    "system": {"anyOf": [_STRING, _TEXT_BLOCKS]},
    "tools": _list(_ANTHROPIC_TOOL),
    "tool_choice": _object({"type": _const("tool"), "name": _STRING}, disable_parallel_tool_use={"type": "boolean"}),
    "thinking": _object({"type": {"enum": ["disabled"]}}, budget_tokens={"type": "integer"}),
    "output_config": _object(
        {}, effort=_const("none"), format=_object({"type": _const("json_schema"), "schema": _ANY})
    ),
    "cache_control": _object({"type": _const("ephemeral")}),
}
_CHAT = copy.deepcopy(ChatRequest.model_json_schema()["properties"]["messages"])
_CHAT["items"]["required"] = ["role", "content"]
_CALL = _CHAT["items"]["properties"]["tool_calls"]["items"]["properties"]["function"]["properties"]
_CALL["arguments"]["default"] = "{}"
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "/v1/responses": {
        "input": {"anyOf": [_STRING, _INPUT]},
        "tools": _list(_RESPONSES_TOOL),
        "tool_choice": _object({"type": _const("function"), "name": _STRING}),
        "text": _object(
            {},
            format=_object(
                {"type": _const("json_schema"), "name": _STRING, "schema": _ANY},
                description=_STRING,
                strict={"type": "boolean"},
            ),
        ),
        "reasoning": _object({}, effort=_STRING),
        "metadata": {"type": "object", "additionalProperties": _STRING},
        "user": _STRING,
        "include": _list(_const("reasoning.encrypted_content")),
    },
    "/v1/messages": _ANTHROPIC,
    "/v1/messages/count_tokens": _ANTHROPIC,
    "/v1/chat/completions": {"messages": _CHAT},
    "/tokenize": {"messages": _CHAT},
}
"""Of what the models have as any object, by endpoint and parameter."""
_ASSISTANT = {"messages": [{"role": "assistant", "content": "hi"}]}
_TOOL = {"tools": [{"type": "function", "function": {"name": "f"}}]}
_CONTEXT: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("/v1/chat/completions", "messages.*.tool_calls"): _ASSISTANT,
    ("/v1/chat/completions", "messages.*.reasoning_content"): _ASSISTANT,
    ("/v1/chat/completions", "messages.*.tool_call_id"): {"messages": [{"role": "tool", "content": "hi"}]},
    ("/v1/chat/completions", "top_logprobs"): {"logprobs": True},
    ("/v1/chat/completions", "stream_options"): {"stream": True},
    ("/v1/completions", "stream_options"): {"stream": True},
    ("/v1/messages", "stream_options"): {"stream": True},
    ("/v1/chat/completions", "max_completion_tokens"): {"max_tokens": None},
    ("/v1/chat/completions", "tool_choice"): _TOOL,
    ("/tokenize", "messages.*.tool_calls"): _ASSISTANT,
    ("/tokenize", "messages"): {"prompt": None},
    ("/v1/responses", "tool_choice"): {"tools": [{"type": "function", "name": "f"}]},
    ("/v1/messages", "tool_choice"): {"tools": [{"name": "f", "input_schema": {}}]},
    ("/v1/messages/count_tokens", "tool_choice"): {"tools": [{"name": "f", "input_schema": {}}]},
    ("/v1/embeddings", "dimensions"): {},
}
"""What else a body needs where something is put at a place: by endpoint and the beginning of the path."""


@dataclass(frozen=True)
class Place:
    """One of them, with one of the types that it takes."""

    endpoint: Endpoint
    path: Path
    containers: tuple[Mapping[str, Any], ...]
    """Schemas of what each part of `path` is in."""
    schema: Mapping[str, Any]
    """Of the value."""

    @property
    def name(self) -> str:
        """As rows are called."""
        dotted = ".".join(self.path).replace(f".{ITEM}", "[]").replace(f".{NAME}", "{}")
        return f"{self.endpoint.path.removeprefix('/v1')}:{dotted}:{self.kind}"

    @property
    def kind(self) -> str:
        """Of values: a type of JSON's, `literal`, or `any`."""
        if "const" in self.schema or "enum" in self.schema:
            return "literal"
        kind: str = self.schema.get("type", "any")
        fields = self.schema.get("properties") or isinstance(self.schema.get("additionalProperties"), Mapping)
        return "any" if kind == "object" and not fields else kind

    @property
    def shared(self) -> bool:
        """Whether another endpoint's parameters have it, and this one takes them as they are."""
        own = SHAPES.get(self.endpoint.path, {}).keys() | self.endpoint.model.model_fields.keys()
        return self.path[0] not in own

    @property
    def field(self) -> str:
        """The last name of the path."""
        return next(part for part in reversed(self.path) if part not in (ITEM, NAME))

    def body(self, value: Any) -> dict[str, Any]:
        """The least body that has `value` here."""
        return self.put(copy.deepcopy(dict(self.endpoint.base)), value)

    def put(self, body: dict[str, Any], value: Any) -> dict[str, Any]:
        """`body` with `value` here, and with what goes with that."""
        dotted = ".".join(self.path)
        for (endpoint, prefix), more in _CONTEXT.items():
            if endpoint == self.endpoint.path and (dotted == prefix or dotted.startswith(f"{prefix}.")):
                body.update(copy.deepcopy({k: v for k, v in more.items() if k not in body or k == "messages"}))
        at: Any = body
        for part, following in zip(self.path[:-1], self.containers[1:], strict=True):
            key: Any = 0 if part == ITEM else "1" if part == NAME else part
            fits = (isinstance(at, list) and bool(at)) or (isinstance(at, dict) and key in at)
            if not fits or not _is(at[key], following):
                made = least(following) if following["type"] == "object" else [least(following["items"])]
                if isinstance(at, list) and not at:
                    at.append(made)
                at[key] = made
            at = at[key]
        last: Any = 0 if self.path[-1] == ITEM else "1" if self.path[-1] == NAME else self.path[-1]
        if isinstance(at, list) and not at:
            at.append(value)
        at[last] = value
        return body


def _is(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether `value` is what this branch of a place takes, as far as constants tell."""
    if schema["type"] == "array":
        return isinstance(value, list)
    if not isinstance(value, dict):
        return False
    required = {name: schema.get("properties", {}).get(name, {}) for name in schema.get("required", ())}
    if not required.keys() <= value.keys():
        return False
    return all(value[name] == one["const"] for name, one in required.items() if "const" in one)


def least(schema: Mapping[str, Any]) -> Any:
    """The least value of a schema."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return "user" if "user" in schema["enum"] else schema["enum"][0]
    if schema.get("default") is not None:
        return schema["default"]
    if (branches := schema.get("anyOf") or schema.get("oneOf")) is not None:
        return least(branches[0])
    kind = schema.get("type", "object")
    match kind[0] if isinstance(kind, list) else kind:
        case "string":
            return "a"
        case "integer" | "number":
            return max(1, schema.get("minimum", 1))
        case "boolean":
            return False
        case "array":
            return [least(schema.get("items", {}))] if schema.get("minItems") else []
        case "null":
            return None
    properties = schema.get("properties", {})
    return {name: least(properties[name]) for name in schema.get("required", ())}


def resolved(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """The same without references."""
    if "$ref" in schema:
        rest = {name: value for name, value in schema.items() if name != "$ref"}
        return resolved(definitions[schema["$ref"].rpartition("/")[2]], definitions) | rest
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in ("properties",):
            found[name] = {key: resolved(one, definitions) for key, one in value.items()}
        elif name in ("anyOf", "oneOf"):
            found[name] = [resolved(one, definitions) for one in value]
        elif name in ("items", "additionalProperties") and isinstance(value, Mapping):
            found[name] = resolved(value, definitions)
        else:
            found[name] = value
    return found


def schema_of(endpoint: Endpoint) -> dict[str, Any]:
    """All parameters of an endpoint."""

    def read(model: type[BaseModel]) -> dict[str, Any]:
        whole = model.model_json_schema()
        return resolved({k: v for k, v in whole.items() if k != "$defs"}, whole.get("$defs", {}))

    schema = read(endpoint.model)
    if endpoint.beside is not None:
        renamed = {"messages", "max_tokens", "max_completion_tokens", "stop", "n", "logprobs", "top_logprobs"}
        others = {k: v for k, v in read(endpoint.beside)["properties"].items() if k not in renamed}
        schema["properties"] = {**others, **schema["properties"]}
    schema["properties"].update(SHAPES.get(endpoint.path, {}))
    return schema


def places(endpoint: Endpoint) -> list[Place]:
    """All of an endpoint, each type that one takes by itself."""
    found: dict[tuple[str, str], Place] = {}
    for place in _below(endpoint, (), (), schema_of(endpoint)):
        if place.path:
            found.setdefault((place.name, str(place.schema) if place.kind == "literal" else ""), place)
    return list(found.values())


def _below(
    endpoint: Endpoint, path: Path, containers: tuple[Mapping[str, Any], ...], schema: Mapping[str, Any]
) -> Iterator[Place]:
    if branches := schema.get("anyOf") or schema.get("oneOf"):
        for branch in branches:
            yield from _below(endpoint, path, containers, branch)
        return
    if isinstance(schema.get("type"), list):
        for kind in schema["type"]:
            yield from _below(endpoint, path, containers, {**schema, "type": kind})
        return
    if schema.get("type") == "null" or schema.get("const", schema) is None:
        return
    yield Place(endpoint, path, containers, schema)
    inside = (*containers, schema)
    if schema.get("type") == "object":
        for name, one in schema.get("properties", {}).items():
            yield from _below(endpoint, (*path, name), inside, one)
        if isinstance(more := schema.get("additionalProperties"), Mapping):
            yield from _below(endpoint, (*path, NAME), inside, more)
    elif schema.get("type") == "array" and isinstance(schema.get("items"), Mapping):
        yield from _below(endpoint, (*path, ITEM), inside, schema["items"])
