"""Which objects a schema leaves open, and that a text ends where its object has what it lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from isthmus_runtime.request import Structure
from isthmus_runtime.structured.grammars import Grammars
from isthmus_runtime.structured.schemas import closed, halved

A = {"type": "object", "properties": {"a": {"type": "integer"}}}
SHUT = {**A, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, SHUT),
        ({"properties": {"a": {}}}, {"properties": {"a": {}}, "additionalProperties": False}),
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({"$defs": {"x": A}, "items": {"$ref": "#/$defs/x"}}, {"$defs": {"x": SHUT}, "items": {"$ref": "#/$defs/x"}}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        ({"allOf": [A]}, {"allOf": [SHUT]}),
        ({"prefixItems": [A], "items": [A]}, {"prefixItems": [SHUT], "items": [SHUT]}),
        # Names of properties are no keywords, and data no schemas.
        (
            {"properties": {"allOf": A, "if": A, "$ref": {}}},
            {"properties": {"allOf": SHUT, "if": SHUT, "$ref": {}}, "additionalProperties": False},
        ),
        ({"const": A, "enum": [A], "default": A}, {"const": A, "enum": [A], "default": A}),
    ],
)
def test_what_is_closed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert closed(schema) == expected


MULTIPLE = {"type": "integer", "multipleOf": 86400}
HALVED = {"anyOf": [{**MULTIPLE, "minimum": 0}, {**MULTIPLE, "maximum": -1}]}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (MULTIPLE, HALVED),
        ({"properties": {"a": MULTIPLE}}, {"properties": {"a": HALVED}}),
        ({"$defs": {"a": MULTIPLE}, "items": [MULTIPLE]}, {"$defs": {"a": HALVED}, "items": [HALVED]}),
        *(
            (one, one)
            for one in ({**MULTIPLE, "minimum": 0}, {"oneOf": [MULTIPLE]}, {"const": MULTIPLE}, {"type": "integer"})
        ),
        ({**MULTIPLE, "type": ["integer", "null"]}, {**MULTIPLE, "type": ["integer", "null"]}),
    ],
)
def test_what_is_halved(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert halved(schema) == expected


@pytest.mark.parametrize("value", [86400, -172800, 0, 7 * 86400, 86401, -1])
def test_multiples_of_the_seconds_of_a_day_are_taken(model: Path, value: int) -> None:
    """Of both signs."""
    grammars = Grammars.load(model, eos_token_ids=(2, 0), vocab_size=410)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    schema = Structure("json_schema", json.dumps({"type": "object", "properties": {"s": MULTIPLE}, "required": ["s"]}))
    guide, ids = grammars.guide(schema), tokenizer.encode(json.dumps({"s": value}), add_special_tokens=False).ids
    fits = True
    for at, token in enumerate(ids):
        mask = guide.allowed(ids[:at])
        if not mask[token >> 3] >> (token & 7) & 1:
            fits = False
            break
    assert fits is (value % 86400 == 0)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "string"}},
        {**A, "patternProperties": {"^x": {"type": "string"}}},
        {**A, "required": ["a", "b"]},
        {**A, "required": True},
        {**A, "required": 5},
        {**A, "required": [["a"], {}]},
        {"allOf": [A, {"properties": {"b": {}}}]},
        {**A, "allOf": [{"properties": {"b": {}}}]},
        {**A, "anyOf": [{"properties": {"b": {}}}, {"properties": {"c": {}}}]},
        {**A, "if": {"properties": {"a": {"const": 1}}}, "then": {"properties": {"b": {}}}},
        {**A, "$ref": "#/$defs/x", "$defs": {"x": {"properties": {"b": {}}}}},
        {"items": {"allOf": [A, A]}},
    ],
)
def test_what_stays_open(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


def test_an_object_that_has_what_it_lists_must_end(model: Path) -> None:
    grammars = Grammars.load(model, eos_token_ids=(2, 0), vocab_size=410)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    ids = tokenizer.encode('{"a":true', add_special_tokens=False).ids

    def may_follow(given: dict[str, Any]) -> set[str]:
        mask = grammars.guide(Structure("json_schema", json.dumps(given))).allowed(ids)
        return {tokenizer.decode([i]) for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1}

    assert "}" in may_follow(schema) and "," not in may_follow(schema)
    assert "," in may_follow({**schema, "additionalProperties": True})
