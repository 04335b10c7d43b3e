"""The texts that clients send, as the grammars that llguidance compiles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from llguidance import LLMatcher

from .schemas import closed, halved

MAX_CHOICES = 4096
# Between JSON's tokens a model may put white space, but not without end: small models do.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""llguidance's `whitespace_pattern`, wherever a schema is compiled."""


def _json_schema(text: str) -> str:
    schema = json.loads(text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema is an object, not {type(schema).__name__}")
    grammar: str = LLMatcher.grammar_from_json_schema(
        halved(closed(schema)), overrides={"whitespace_pattern": WHITESPACE}
    )
    return grammar


def json_rule(name: str, schema: Mapping[str, Any]) -> str:
    """A rule of a Lark grammar whose text is JSON of a schema, which is taken as it is."""
    return f"{name}: %json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}})


def _choice(text: str) -> str:
    choices: Any = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise ValueError("give a list of one or more strings, none empty")
    if len(choices) > MAX_CHOICES:
        raise ValueError(f"{len(choices)} choices, at most {MAX_CHOICES} are allowed")
    return str(LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices)))


GRAMMARS: Mapping[str, Any] = MappingProxyType(
    {
        "json_object": lambda _: _json_schema('{"type": "object"}'),
        "json_schema": _json_schema,
        "regex": LLMatcher.grammar_from_regex,
        "choice": _choice,
        "grammar": LLMatcher.grammar_from_lark,
    }
)
"""By kind; ValueError and RecursionError for what is none."""


def after(begin: str, kind: str, text: str) -> str:
    """A grammar of two: `begin`, rules in Lark's syntax of which `start` ends with `@answer`, and what `text` is by its
    `kind`, whose names are its own. ValueError and RecursionError for a text that is none."""
    source: str = GRAMMARS[kind](text)
    parts: Any = [{"lark_grammar": source}]
    if source.lstrip().startswith("{"):  # of a client it may be any JSON
        parts = json.loads(source).get("grammars")
        if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
            raise ValueError("a grammar as JSON has `grammars`, a list of objects")
    first, *others = parts
    main = {"name": "begin", "lark_grammar": begin}
    return json.dumps({"grammars": [main, {**first, "name": "answer"}, *others]})
