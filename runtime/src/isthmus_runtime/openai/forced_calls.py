"""`tool_choice` required, or a tool by name: the text that such an answer must be, whatever the model's own format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidRequest
from ..request import Structure

_DEFINITIONS = ("$defs", "definitions")


def forced_names(choice: object, tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The tools of which one must be called; none: the model is free. InvalidRequest names `tool_choice`."""
    names = [t["function"]["name"] for t in tools]
    if choice in (None, "none", "auto"):
        return []
    if choice == "required":
        if not names:
            raise InvalidRequest("tool_choice: required, but there are no tools; give some", param="tool_choice")
        return names
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if name is None:
        known = '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
        raise InvalidRequest(f"tool_choice: must be {known}", param="tool_choice")
    if name not in names:
        raise InvalidRequest(f"tool_choice: {name!r} is none of the tools", param="tool_choice")
    return [name]


def call_structure(names: Sequence[str], tools: Sequence[Mapping[str, Any]], *, several: bool) -> Structure:
    """JSON that `tool_formats/plain_json.py` reads as a call of one of `names`, or as a list of calls."""
    shared: dict[str, dict[str, Any]] = {}
    calls = []
    for tool in tools:
        function = tool["function"]
        if function["name"] not in names:
            continue
        arguments = dict(function.get("parameters") or {"type": "object"})
        for key in _DEFINITIONS:  # references to them begin at the root
            for name, definition in (arguments.pop(key, None) or {}).items():
                if shared.setdefault(key, {}).setdefault(name, definition) != definition:
                    raise InvalidRequest(
                        f"tools: two of them define {key}/{name} differently; rename one", param="tools"
                    )
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    one = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema = {"type": "array", "items": one, "minItems": 1} if several else one
    return Structure("json_schema", json.dumps({**schema, **shared}))
