"""Messages and tools of a conversation: checked, and as chat templates take them. InvalidRequest names the path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidRequest
from .bodies import MOST_IN_A_TEXT, TextsOfJson, least_written
from .problems import MAX_PROBLEMS, invalid

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MAX_TOOLS = 512

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "refusal": (),
    "function_call": (),
    "audio": (),
    "annotations": ([],),
}
"""Not implemented; values that ask for nothing."""

_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CALL = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": ["string", "object"]}},
            "required": ["name", "arguments"],
        },
    },
    "required": ["function"],
}
_TEXT = {"type": ["string", "null"]}
MESSAGES = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": list(_ROLES)},
            "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART}]},
            "name": _TEXT,
            "tool_call_id": _TEXT,
            "tool_calls": {"type": ["array", "null"], "items": _CALL},
            "reasoning_content": _TEXT,
            **{name: {"enum": [*values, None]} for name, values in _NEUTRAL.items()},
        },
        "required": ["role"],
        "additionalProperties": False,
    },
    "minItems": 1,
}
TOOLS = {
    "type": ["array", "null"],
    "items": {
        "type": "object",
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "minLength": 1, "maxLength": 256},
                    "description": _TEXT,
                    "parameters": {"type": ["object", "null"]},
                    "strict": {"type": ["boolean", "null"]},
                },
                "required": ["name"],
            },
        },
        "required": ["type", "function"],
    },
    "maxItems": MAX_TOOLS,
}
"""JSON schemas of what `conversation` and `offered` take."""

TOOL_CHOICE: dict[str, Any] = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}},
                    "required": ["name"],
                    "additionalProperties": False,
                },
            },
            "required": ["type", "function"],
            "additionalProperties": False,
        },
    ]
}


def conversation(messages: object) -> list[dict[str, Any]]:
    """Messages with plain text content; arguments of tool calls are objects, as templates expect them."""
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages: must be a list with at least one message", param="messages")
    texts = TextsOfJson()
    return [_message(m, f"messages[{i}]", texts) for i, m in enumerate(messages)]


def offered(tools: object) -> list[dict[str, Any]]:
    """The tools of a request, each as it was given less what is null; `strict` goes as a hint, to the template too."""
    return [_tool(t, f"tools[{i}]") for i, t in enumerate(few_tools(tools))]


def few_tools(tools: object) -> list[Any]:
    """`tools`, where it is a list and not too long. InvalidRequest."""
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools: must be a list of at most {MAX_TOOLS} tools", param="tools")
    return tools


def _tool(tool: object, path: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or kind != "function":
        raise InvalidRequest(f"{path}.type: {kind!r} is not supported; only function is", param=f"{path}.type")
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not 0 < len(name) <= 256:
        raise InvalidRequest(
            f"{path}.function.name: must be a name of 1 to 256 characters", param=f"{path}.function.name"
        )
    for field, wanted in (("description", str), ("parameters", dict), ("strict", bool)):
        if function.get(field) is not None and not isinstance(function[field], wanted):
            where = f"{path}.function.{field}"
            raise InvalidRequest(f"{where}: must be a {wanted.__name__}", param=where)
    unknown = (set(tool) - {"type", "function"}) | (set(function) - {"name", "description", "parameters", "strict"})
    if unknown:
        where = f"{path}.{min(unknown)}"
        raise InvalidRequest(f"{where}: unknown parameter; remove it", param=where)
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None and k != "strict"}}


def _message(value: object, path: str, texts: TextsOfJson) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path}: must be an object with role and content", param=path)
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(_ROLES)
        raise InvalidRequest(f"{path}.role: {role!r} is not supported; supported: {known}", param=f"{path}.role")
    calls = value.get("tool_calls") or []
    without = role == "assistant" and value.get("content") is None and bool(calls)
    message: dict[str, Any] = {
        "role": _ROLES[role],
        "content": "" if without else _content(value.get("content"), f"{path}.content"),
    }
    problems: list[tuple[str, str]] = []
    for name, field in value.items():
        if name in ("role", "content") or field is None:
            continue
        where = f"{path}.{name}"
        if name in ("name", "tool_call_id", "reasoning_content"):
            if isinstance(field, str):
                message[name] = field
            else:
                problems.append((where, f"{where}: must be a string"))
        elif name == "tool_calls":
            if not isinstance(field, list):
                problems.append((where, f"{where}: must be a list"))
            elif field and role != "assistant":
                problems.append((where, f"{where}: only messages of the assistant have calls; remove it"))
            elif field:
                message[name] = [_call(c, f"{where}[{i}]", texts) for i, c in enumerate(field)]
        elif name in _NEUTRAL:
            if field not in _NEUTRAL[name]:
                problems.append((where, f"{where}: not supported; remove it"))
        else:
            problems.append((where, f"{where}: unknown parameter; remove it"))
        if len(problems) > MAX_PROBLEMS:
            break  # of a million
    if problems:
        raise invalid(problems)
    return message


def _call(call: object, path: str, texts: TextsOfJson) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(call, dict) or call.get("type", "function") != "function" or not isinstance(function, dict):
        raise InvalidRequest(f"{path}: must be an object with id, type: function, and function", param=path)
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{path}.function.name: must be a string", param=f"{path}.function.name")
    arguments, where = function.get("arguments"), f"{path}.function.arguments"
    if isinstance(arguments, str):
        try:
            arguments = texts.read(arguments or "{}", where)
        except InvalidRequest:
            raise
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{where}: must be a JSON object, or the text of one", param=where)
    if least_written(arguments, MOST_IN_A_TEXT) > MOST_IN_A_TEXT:
        # As a text of it: a template writes each at once, and no other thread runs meanwhile.
        raise InvalidRequest(
            f"{where}: more than {MOST_IN_A_TEXT} characters as JSON are not allowed; shorten it", param=where
        )
    identifier = call.get("id")
    if identifier is not None and not isinstance(identifier, str):
        raise InvalidRequest(f"{path}.id: must be a string", param=f"{path}.id")
    found: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return found if identifier is None else {"id": identifier, **found}


def _content(value: object, path: str) -> str:
    """Text, or text parts joined by newlines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(f"{path}: must be a string or a list of text parts", param=path)
    texts = []
    for i, part in enumerate(value):
        where = f"{path}[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise InvalidRequest(f"{where}.type: {kind!r} is not supported; only text is", param=f"{where}.type")
        text = part.get("text")
        if not isinstance(text, str) or len(part) != 2:
            raise InvalidRequest(f"{where}: must hold type and text (a string), and nothing else", param=where)
        texts.append(text)
    return "\n".join(texts)


def chosen(tools: list[dict[str, Any]], choice: object) -> list[dict[str, Any]]:
    """The tools that `tool_choice` leaves. InvalidRequest for one that cannot be."""
    if choice in (None, "none", "auto"):
        return tools
    if choice == "required":
        if not tools:
            raise InvalidRequest("tool_choice: required, but no tools are given", param="tool_choice")
        return tools
    named = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(choice, dict) or set(choice) != {"type", "function"} or not isinstance(name, str):
        raise InvalidRequest(
            'tool_choice: must be none, auto, required or {"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    found = [tool for tool in tools if tool["function"]["name"] == name]
    if not found:
        raise InvalidRequest(f"tool_choice: no function {name[:64]!r} is among the tools", param="tool_choice")
    return found
