"""JSON schemas before they become grammars. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are schemas by name."""
_INNER = (
    *("anyOf", "oneOf", "allOf", "prefixItems", "items", "additionalItems", "contains", "propertyNames"),
    *("additionalProperties", "unevaluatedProperties", "not", "if", "then", "else"),
)
"""Keywords whose values are a schema or a list of schemas."""
_SAYS_MORE = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties"})
_HALVED_IN = ("anyOf", "prefixItems", "items", "additionalProperties")
"""Where a schema may become two without a change of what others say."""
_BOUNDS = frozenset(
    (
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "enum", "const"),
        *("$ref", "anyOf", "oneOf", "allOf", "not", "if"),
    )
)
_PLACES = frozenset({"properties", "$ref", "anyOf", "oneOf", "allOf", "if", "dependentSchemas"})
"""Keywords that may each say what properties one object has."""


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The same, but that objects which list their properties have no others, unless the schema says what others may be.

    By JSON Schema everything that is not forbidden is allowed, and a small model that may add properties goes on with
    them until its tokens are used up. Whoever lists properties means these: xgrammar, outlines and OpenAI's strict mode
    read it so. Objects that list none stay open; and so do all where one of them says in several places what it has,
    each of which would forbid what the others allow.
    """
    return dict(schema) if _joins(schema) else _closed(schema)


def halved(schema: Any) -> Any:
    """The same, but an integer that is a multiple of something, without a bound, is one from 0 on, or one below: what
    llguidance makes of both together takes 18 MB for the multiples of 86,400, and of each alone 0.4."""
    if isinstance(schema, list):
        return [halved(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {
        name: {key: halved(one) for key, one in value.items()}
        if name in BY_NAME and isinstance(value, Mapping)
        else halved(value)
        if name in _HALVED_IN
        else value
        for name, value in schema.items()
    }
    if found.get("type") != "integer" or "multipleOf" not in found or _BOUNDS & found.keys():
        return found
    return {"anyOf": [{**found, "minimum": 0}, {**found, "maximum": -1}]}


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in BY_NAME and isinstance(value, Mapping):
            found[name] = {key: _closed(one) for key, one in value.items()}
        else:
            found[name] = _closed(value) if name in _INNER else value
    listed = schema.get("properties")
    if isinstance(listed, Mapping) and not _SAYS_MORE & schema.keys() and _lists(listed, schema.get("required")):
        found["additionalProperties"] = False
    return found


def _lists(properties: Mapping[str, Any], required: Any) -> bool:
    """Whether all that is required is listed. What is no list of names, whoever compiles the schema refuses."""
    return not required or (isinstance(required, list) and all(type(n) is str and n in properties for n in required))


def _joins(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_joins, schema))
    if not isinstance(schema, Mapping):
        return False
    together = schema.get("allOf")
    several = len(_PLACES & schema.keys()) > 1 or (isinstance(together, list) and len(together) > 1)
    return several or any(map(_joins, _parts(schema)))


def _parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    for name, value in schema.items():
        if name in BY_NAME and isinstance(value, Mapping):
            yield from value.values()
        elif name in _INNER:
            yield value
