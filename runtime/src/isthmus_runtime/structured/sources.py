"""The texts that clients send, as the grammars that llguidance compiles."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from llguidance import LLMatcher

from ..request import Structure
from .schemas import closed

ANSWER = "the_answer"
"""The rule that `as_rules` begins with."""
MAX_CHOICES = 4096
# Between JSON's tokens a model may put white space, but not without end: small models do.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""llguidance's `whitespace_pattern`, wherever a schema is compiled."""


_START = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])*/|<[^<>\s]*>|\bstart\b')
"""In Lark: what may hold the word without meaning the rule, or the rule's name."""


def _schema(text: str) -> dict[str, Any]:
    schema = json.loads(text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema is an object, not {type(schema).__name__}")
    return schema


def _json_schema(text: str) -> str:
    schema = _schema(text)
    grammar: str = LLMatcher.grammar_from_json_schema(closed(schema), overrides={"whitespace_pattern": WHITESPACE})
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


def _renamed(lark: str) -> str:
    return _START.sub(lambda found: ANSWER if found[0] == "start" else found[0], lark)


def as_rules(structure: Structure) -> str:
    """A structure as rules of a Lark grammar, which begin with ANSWER, to put something before it. ValueError and
    RecursionError for what is none; that its text is right is not checked."""
    match structure.kind:
        case "json_object":
            return json_rule(ANSWER, {"type": "object"})
        case "json_schema":
            return json_rule(ANSWER, closed(_schema(structure.text)))
        case "regex":
            (made,) = json.loads(LLMatcher.grammar_from_regex(structure.text))["grammars"]
            return _renamed(made["lark_grammar"])
        case "choice":
            return _renamed(_choice(structure.text))
        case "grammar":
            return _renamed(structure.text)


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
