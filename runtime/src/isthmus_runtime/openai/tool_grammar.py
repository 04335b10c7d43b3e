"""What an answer must be where a tool has to be called, as a grammar: `tool_choice` required or a named function. Pure.

Each format of `tool_formats` is written here as its parser reads it; arguments are held to their function's schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..request import Structure
from ..structured.schemas import BY_NAME, closed
from ..structured.sources import after, json_rule

MAX_CALLS = 16
"""Most calls in one answer that must call: a model that is held to a list may go on with it."""

_DATA = frozenset({"const", "enum", "default", "examples"})

TokenId = Callable[[str], int | None]
"""Id of a control token; None where the text is no token of its own."""


def calls_grammar(
    form: str,
    functions: Sequence[Mapping[str, Any]],
    token_id: TokenId,
    *,
    several: bool,
    answer: Mapping[str, Any] | None = None,
    thinking: str = "",
) -> Structure:
    """One call of `functions` (as in `tools[].function`), or with `several` one or more, in the format named `form`.

    With `answer`, a JSON schema, text that fulfils it will do as well. `thinking`: the text that ends a reasoning which
    the prompt has begun; it comes before anything else.
    """
    calls = _FORMATS[form](functions, token_id, several)
    before, thought = _thought(thinking, token_id) if thinking else ("", [])
    rules = [f"start: {before}" + ("(calls | answer)" if answer is not None else "calls"), *calls, *thought]
    if answer is not None:
        rules.append(json_rule("answer", closed(answer)))
    return Structure("grammar", "\n".join(rules))


def after_thought(answer: Structure, token_id: TokenId, thinking: str) -> Structure:
    """The rest of a reasoning that the prompt has begun, the text `thinking`, which ends it, and then `answer`.

    ValueError and RecursionError where that is none.
    """
    before, thought = _thought(thinking, token_id)
    return Structure("grammar", after("\n".join([f"start: {before}@answer", *thought]), answer.kind, answer.text))


def _thought(thinking: str, token_id: TokenId) -> tuple[str, list[str]]:
    """What stands before an answer, and its rules."""
    space = "SPACE: /[ \\n]{1,4}/"
    if token_id(thinking) is None:
        return "thought SPACE? ", [f"thought[suffix={json.dumps(thinking)}]: /(.|\\n)*/", space]
    return "thought ", [f"thought: TEXT {_tag(thinking, token_id)} SPACE?", "TEXT: /(.|\\n)*/", space]


def _hermes(functions: Sequence[Mapping[str, Any]], token_id: TokenId, several: bool) -> list[str]:
    opening, closing = (_tag(text, token_id) for text in ("<tool_call>", "</tool_call>"))
    more = f' ("\\n" call){{0,{MAX_CALLS - 1}}}' if several else ""
    return [f"calls: call{more}", f'call: {opening} "\\n" object "\\n" {closing}', _object(functions, "arguments")]


def _llama3(functions: Sequence[Mapping[str, Any]], token_id: TokenId, several: bool) -> list[str]:
    more = f' ("; " object){{0,{MAX_CALLS - 1}}}' if several else ""
    return [f"calls: object{more}", _object(functions, "parameters")]


def _mistral(functions: Sequence[Mapping[str, Any]], token_id: TokenId, several: bool) -> list[str]:
    opening = _tag("[TOOL_CALLS]", token_id)
    if token_id("[ARGS]") is None:
        return [f"calls: {opening} list", _list(several), _object(functions, "arguments")]
    ends = _tag("[ARGS]", token_id)
    named = [
        f"call_{number}: {opening} {json.dumps(function['name'])} {ends} arguments_{number}\n"
        + json_rule(f"arguments_{number}", _arguments(function))
        for number, function in enumerate(functions)
    ]
    more = f"{{1,{MAX_CALLS}}}" if several else ""
    return [f"calls: call{more}", "call: " + " | ".join(f"call_{n}" for n in range(len(functions))), *named]


def _plain(functions: Sequence[Mapping[str, Any]], token_id: TokenId, several: bool) -> list[str]:
    if not several:
        return ["calls: object", _object(functions, "arguments")]
    return ["calls: object | list", _list(True), _object(functions, "arguments")]


_FORMATS: Mapping[str, Callable[[Sequence[Mapping[str, Any]], TokenId, bool], list[str]]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "json": _plain,
}


def _tag(text: str, token_id: TokenId) -> str:
    """A control token by its id, where it is one; else its text."""
    found = token_id(text)
    return json.dumps(text) if found is None else f"<[{found}]>"


def _object(functions: Sequence[Mapping[str, Any]], arguments: str) -> str:
    """Each function by a rule of its own, so that references within its schema have a root."""
    rules = [json_rule(f"object_{number}", _call(function, arguments)) for number, function in enumerate(functions)]
    return "\n".join(["object: " + " | ".join(f"object_{number}" for number in range(len(functions))), *rules])


def _list(several: bool) -> str:
    more = f' ("," BLANK? object BLANK?){{0,{MAX_CALLS - 1}}}' if several else ""
    return f'list: "[" BLANK? object BLANK?{more} "]"\nBLANK: /[ \\n]{{1,8}}/'


def _call(function: Mapping[str, Any], arguments: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, arguments: _under(_arguments(function), arguments)},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    given = function.get("parameters") or {"type": "object", "properties": {}}
    return closed(given)


def _under(schema: Any, name: str) -> Any:
    """A schema that has become the property `name` of another: its references begin at that one's root."""
    if isinstance(schema, list):
        return [_under(item, name) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: {inner: _under(one, name) for inner, one in value.items()}  # names of properties are no keywords
        if key in BY_NAME and isinstance(value, dict)
        else value
        if key in _DATA
        else _under(value, name)
        for key, value in schema.items()
    }
    ref = found.get("$ref")
    if isinstance(ref, str) and ref.startswith("#"):
        found["$ref"] = f"#/properties/{name}{ref[1:]}"
    return found
