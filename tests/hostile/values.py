"""Values that grow: for each kind of place, families of the largest and the oddest. Pure; `r` is seeded.

A family makes a value of about `n` characters (or items, or levels), which the search doubles until it is refused.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Mapping
from typing import Any

from places import Place, least

from isthmus_runtime.openai.bodies import HINTS

Make = Callable[[int, random.Random], Any]

_LETTERS = string.ascii_lowercase


def _cycle(piece: str) -> Make:
    return lambda n, r: (piece * (n // len(piece) + 1))[:n]


_BLOCK = 1 << 16
"""Of what is random there are no more different letters: to make megabytes of them takes seconds."""


def _words(n: int, r: random.Random) -> str:
    some = " ".join("".join(r.choices(_LETTERS, k=r.randint(2, 9))) for _ in range(min(n, _BLOCK) // 6 + 1))
    return _cycle(f"{some} ")(n, r)


def _letters(n: int, r: random.Random) -> str:
    return _cycle("".join(r.choices(_LETTERS, k=min(n, _BLOCK))))(n, r)


def _mixed(n: int, r: random.Random) -> str:
    kinds = ((32, 126), (0xA0, 0xD7FF), (0x10000, 0x1F000))
    return _cycle("".join(chr(r.randint(*r.choice(kinds))) for _ in range(min(n, _BLOCK))))(n, r)


def _ids(n: int, r: random.Random) -> list[int]:
    some = [r.randrange(49_000) for _ in range(min(n, _BLOCK))]
    return (some * (n // len(some) + 1))[:n]


STRINGS: Mapping[str, Make] = {
    "letter": _cycle("a"),
    "digit": _cycle("7"),
    "space": _cycle(" "),
    "line": _cycle("\n"),
    "words": _words,
    "letters": _letters,
    "wide": _cycle("漢字仮名"),
    "smile": _cycle("\U0001f600"),
    "marks": _cycle("e\u0301\u0323\u0308"),
    "onesmile": lambda n, r: "\U0001f600" + "a" * n,
    "control": _cycle("<|im_start|>"),
    "smilecontrol": lambda n, r: "\U0001f600<|im_start|>" + "a" * n,
    "nearly": _cycle("<|im_sta"),
    "angles": _cycle("<"),
    "quotes": _cycle('"'),
    "backslash": _cycle("\\"),
    "nul": _cycle("\0"),
    "braces": _cycle("{"),
    "points": _cycle("#"),
    "mixed": _mixed,
}
"""Texts of n characters."""


def _nested(begin: str, end: str, inside: str) -> Make:
    def make(n: int, r: random.Random) -> Any:
        try:
            return json.loads(begin * n + inside + end * n)
        except RecursionError:
            return Raw(begin * n + inside + end * n)

    return make


class Raw(str):
    """A value as JSON, where Python's own would not be made."""


JSONS: Mapping[str, Make] = {
    "keys": lambda n, r: {f"k{i}": 0 for i in range(n)},
    "texts": lambda n, r: {"k": [f"t{i}" for i in range(n)]},
    "numbers": lambda n, r: {"k": [0] * n},
    "floats": lambda n, r: {"k": [1.5e-7 * (i + 1) for i in range(n)]},
    "lists": lambda n, r: {"k": [[] for _ in range(n)]},
    "objects": lambda n, r: {"k": [{} for _ in range(n)]},
    "pairs": lambda n, r: {"k": [{"a": 1} for _ in range(n)]},
    "deep": _nested('{"a":', "}", "1"),
    "deeplists": lambda n, r: {"k": _nested("[", "]", "1")(n, r)},
    "key": lambda n, r: {"k" * n: 0},
    "text": lambda n, r: {"k": "a" * n},
    "smile": lambda n, r: {"k": "\U0001f600" * n},
    "control": lambda n, r: {"k": _cycle("<|im_start|>")(n, r)},
    "digits": lambda n, r: {"k": int("7" * min(n, 4300))},
}
"""Objects of n parts, levels or characters."""


def _properties(n: int, **more: Any) -> dict[str, Any]:
    return {f"p{i}": {"type": "string", **more} for i in range(n)}


def _of(keyword: str, make: Make) -> Make:
    return lambda n, r: {keyword: make(n, r)}


SCHEMAS: Mapping[str, Make] = {
    "properties": lambda n, r: {"type": "object", "properties": _properties(n)},
    "required": lambda n, r: {"type": "object", "properties": _properties(n), "required": [f"p{i}" for i in range(n)]},
    "enum": _of("enum", lambda n, r: [f"e{i}" for i in range(n)]),
    "enumsame": _of("enum", lambda n, r: ["e" * (i + 1) for i in range(min(n, 4000))]),
    "const": _of("const", _cycle("a")),
    "anyOf": _of("anyOf", lambda n, r: [{"const": f"c{i}"} for i in range(n)]),
    "anyOfObjects": _of(
        "anyOf", lambda n, r: [{"type": "object", "properties": _properties(i + 1)} for i in range(min(n, 1000))]
    ),
    "oneOf": _of("oneOf", lambda n, r: [{"const": f"c{i}"} for i in range(n)]),
    "allOf": _of("allOf", lambda n, r: [{"type": "object", "properties": {f"p{i}": {}}} for i in range(n)]),
    "allOfPatterns": _of("allOf", lambda n, r: [{"type": "string", "pattern": f"a{{{i + 1}}}"} for i in range(n)]),
    "deep": lambda n, r: _wrap(n, lambda one: {"type": "object", "properties": {"p": one}}),
    "deepitems": lambda n, r: _wrap(n, lambda one: {"type": "array", "items": one}),
    "deepany": lambda n, r: _wrap(n, lambda one: {"anyOf": [one, {"type": "null"}]}),
    "prefixItems": _of("prefixItems", lambda n, r: [{"type": "integer"}] * n),
    "minItems": lambda n, r: {"type": "array", "items": {"type": "integer"}, "minItems": n},
    "maxItems": lambda n, r: {"type": "array", "items": {"type": "integer"}, "maxItems": n},
    "minLength": lambda n, r: {"type": "string", "minLength": n},
    "maxLength": lambda n, r: {"type": "string", "maxLength": n},
    "minProperties": lambda n, r: {"type": "object", "minProperties": n},
    "pattern": lambda n, r: {"type": "string", "pattern": "(a|b)*" * n},
    "patternCount": lambda n, r: {"type": "string", "pattern": f"^(a|b|c){{0,{n}}}$"},
    "patternProperties": lambda n, r: {"patternProperties": {f"^k{i}.*$": {"type": "string"} for i in range(n)}},
    "propertyNames": lambda n, r: {"propertyNames": {"pattern": f"^[a-z]{{1,{n}}}$"}},
    "maximum": lambda n, r: {"type": "integer", "minimum": 0, "maximum": int("9" * min(n, 4300))},
    "multipleOf": lambda n, r: {"type": "integer", "multipleOf": n},
    "numbers": lambda n, r: {"type": "number", "minimum": -float(n), "maximum": float(n) + 0.1},
    "format": lambda n, r: {"anyOf": [{"type": "string", "format": f} for f in ("date-time", "uuid", "email")] * n},
    "defs": lambda n, r: {
        "$defs": {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{(i + 1) % n}"}} for i in range(n)},
        "$ref": "#/$defs/d0",
    },
    "defsTwice": lambda n, r: {
        "$defs": {
            f"d{i}": {"type": "object", "properties": {k: {"$ref": f"#/$defs/d{min(i + 1, n)}"} for k in "ab"}}
            for i in range(n)
        }
        | {f"d{n}": {"type": "null"}},
        "$ref": "#/$defs/d0",
    },
    "additional": lambda n, r: _wrap(n, lambda one: {"type": "object", "additionalProperties": one}),
    "conditions": lambda n, r: {"allOf": [{"if": {"required": [f"p{i}"]}, "then": {}} for i in range(n)]},
    "not": lambda n, r: _wrap(n, lambda one: {"not": one}),
    "types": _of("type", lambda n, r: ["string", "integer", "null", "boolean", "array"] * n),
    "description": _of("description", _words),
    "odd": lambda n, r: {"type": "object", "properties": {'"\\\n' + "é" * n: {}}},
}
"""Schemas, by each keyword at size n."""


def _wrap(n: int, outer: Callable[[Any], Any]) -> Any:
    found: Any = {}
    for _ in range(n):
        found = outer(found)
    return found


REGEXES: Mapping[str, Make] = {
    "literal": _cycle("a"),
    "count": lambda n, r: f"a{{{n}}}",
    "counts": lambda n, r: f"(ab?c*){{0,{n}}}",
    "nested": lambda n, r: f"((a{{0,{n}}}){{0,{n}}}b){{0,{n}}}",
    "stars": lambda n, r: "(a*)*" * n,
    "maybe": lambda n, r: "a?" * n + "a" * n,
    "anything": lambda n, r: ".*" * n,
    "lookback": lambda n, r: f".*a.{{{n}}}",
    "classes": lambda n, r: "[a-z0-9]" * n,
    "unicode": lambda n, r: r"\p{L}" * n,
    "unicodes": lambda n, r: rf"(\p{{L}}|\p{{N}}|\w){{0,{n}}}",
    "or": lambda n, r: "|".join(f"w{i}" for i in range(n)),
    "parens": lambda n, r: "(" * n + "a" + ")" * n,
    "and": lambda n, r: "&".join(f"(.*a.{{{i % 7}}})" for i in range(n)),
    "negated": lambda n, r: "[^" + "".join(chr(0x4E00 + 2 * (i % 9000)) for i in range(n)) + "]*",
    "open": lambda n, r: "(" * n,
}
GRAMMARS: Mapping[str, Make] = {
    "literal": lambda n, r: f'start: "{"a" * n}"',
    "or": lambda n, r: "start: " + " | ".join(f'"w{i}"' for i in range(n)),
    "rules": lambda n, r: "start: r0\n" + "\n".join(f'r{i}: "a" r{(i + 1) % n} | "b"' for i in range(n)),
    "terminals": lambda n, r: (
        "start: (" + "|".join(f"T{i}" for i in range(n)) + ")*\n" + "\n".join(f"T{i}: /a{i}b*/" for i in range(n))
    ),
    "ambiguous": lambda n, r: "start: e\ne: " + " | ".join(["e e"] * n) + ' | "a"',
    "empty": lambda n, r: (
        "start: " + " ".join(f"r{i}" for i in range(n)) + "\n" + "\n".join(f'r{i}: "a"?' for i in range(n))
    ),
    "regex": lambda n, r: f"start: /(a|b|c){{0,{n}}}/",
    "and": lambda n, r: "start: T\nT: " + " & ".join(f"/.*a.{{{i % 9}}}/" for i in range(n)),
    "json": lambda n, r: "start: %json " + json.dumps(SCHEMAS["properties"](n, r)),
    "jsons": lambda n, r: 'start: "x" ' + " ".join('%json {"type": "object"}' for _ in range(n)),
    "repeat": lambda n, r: f'start: "a"~{n}',
    "lines": lambda n, r: "start: " + "\n| ".join(['"a"'] * n),
    "comments": lambda n, r: 'start: "a"\n' + "// x\n" * n,
    "internal": lambda n, r: json.dumps({"grammars": [{"json_schema": SCHEMAS["enum"](n, r)}]}),
}


def _shorter(families: Mapping[str, Make]) -> dict[str, Make]:
    """As the text of JSON."""
    return {name: (lambda n, r, make=make: _text(make(n, r))) for name, make in families.items()}


def _text(value: Any) -> str:
    return str(value) if isinstance(value, Raw) else json.dumps(value)


def _items(place: Place) -> dict[str, Make]:
    schema = place.schema.get("items", {})
    if not isinstance(schema, Mapping):
        schema = {}
    if schema.get("type") == "integer":
        return {
            "same": lambda n, r: [1] * n,
            "rising": lambda n, r: list(range(n)),
            "random": _ids,
            "huge": lambda n, r: [10**18 + i for i in range(n)],
        }
    if schema.get("type") == "string":
        return {
            "letter": lambda n, r: ["a"] * n,
            "distinct": lambda n, r: [f"{i:x}" for i in range(n)],
            "longer": lambda n, r: ["a" * (i + 1) for i in range(min(n, 4000))],
            "hundreds": lambda n, r: [_words(200, r)] * n,
            "few": lambda n, r: ["7" * n for _ in range(16)],
            "smiles": lambda n, r: ["\U0001f600" * (i % 9 + 1) for i in range(n)],
        }
    if schema.get("type") == "array":
        return {
            "one": lambda n, r: [[1]] * n,
            "long": lambda n, r: [_ids(n, r)] * 16,
            "many": lambda n, r: [_ids(64, r)] * n,
        }
    if schema:
        return {
            "least": lambda n, r: [least(schema)] * n,
            "wrong": lambda n, r: [{}] * n,
            "numbers": lambda n, r: [0] * n,
            "fields": lambda n, r: [{f"f{i}": 0 for i in range(n)}],
            "eachwrong": lambda n, r: [{"zz": 0}] * n,
        }
    inside = {name: JSONS[name] for name in ("numbers", "texts", "lists", "objects")}
    return {name: (lambda n, r, make=make: make(n, r)["k"]) for name, make in inside.items()}


FIXED = ("boolean", "literal")
"""Kinds whose values do not grow."""
OWN = ("arguments",)
"""Texts that are nothing but what their own families make."""
_FEW = ("letter", "smile", "control", "keys", "deep", "up", "random", "distinct", "least", "true", "digits")
_SHORT = 4096


def families(place: Place) -> dict[str, Make]:
    """Those of a place, by name: a few of one that has another place's code, no effect, or little room."""
    found = _families(place)
    little = place.schema.get("maxLength", _SHORT) < _SHORT or place.path[-1] in HINTS
    if place.kind not in FIXED and (place.shared or little):
        found = {name: make for name, make in found.items() if name in _FEW}
    if place.endpoint.path != "/v1/chat/completions":
        found = {name: make for name, make in found.items() if not name.startswith("own-") or place.field in OWN}
    return found


def _families(place: Place) -> dict[str, Make]:
    match place.kind:
        case "string":
            own: Mapping[str, Make] = {
                "regex": REGEXES,
                "grammar": GRAMMARS,
                "json": _shorter(SCHEMAS),
                "arguments": _shorter(JSONS),
            }.get(place.field, {})
            return {**STRINGS, **{f"own-{name}": make for name, make in own.items()}}
        case "integer":
            return {
                "up": lambda n, r: 2 ** min(n, 14_000),
                "down": lambda n, r: -(2 ** min(n, 14_000)),
                "count": lambda n, r: n,
            }
        case "number":
            return {
                "up": lambda n, r: Raw(f"1e{n}"),
                "small": lambda n, r: Raw(f"1e-{n}"),
                "digits": lambda n, r: Raw("0." + "1" * n),
                "down": lambda n, r: -n,
            }
        case "boolean":
            return {"true": lambda n, r: True, "false": lambda n, r: False}
        case "array":
            return _items(place)
        case "literal":
            values = place.schema.get("enum", [place.schema.get("const")])
            found: dict[str, Make] = {f"is-{value}": (lambda n, r, value=value: value) for value in values}
            return {**found, "wrong": _cycle("a")}
        case "object":
            more = place.schema.get("additionalProperties")
            if not isinstance(more, Mapping):
                return {"fields": JSONS["keys"], "text": JSONS["text"], "deep": JSONS["deep"]}
            value: Any = 1 if place.field == "logit_bias" else least(more)
            return {
                "keys": lambda n, r: {str(i): value for i in range(n)},
                "digits": lambda n, r: {"7" * n: value},
                "long": lambda n, r: {f"{i}" + "k" * 500: value for i in range(n)},
                "wrong": lambda n, r: {f"w{i}": [] for i in range(n)},
            }
    schemas = place.field in ("schema", "json", "parameters", "input_schema")
    return {**JSONS, **({f"own-{name}": make for name, make in SCHEMAS.items()} if schemas else {})}


def largest(place: Place) -> list[Any]:
    """A few values of a field that is a number or a word, from large to small: what makes others dearer."""
    if place.kind == "boolean":
        return [True]
    if place.kind == "integer":
        return [place.schema.get("maximum", 128), 128, 20, 2, -1]
    if place.kind == "literal":
        if "Not implemented" in place.schema.get("description", ""):
            return []
        return [value for value in place.schema.get("enum", [place.schema.get("const")]) if value is not None]
    return []


def written(value: Any) -> bytes:
    """As JSON, `Raw` as it is."""
    marks: dict[str, str] = {}

    def marked(one: Any) -> Any:
        if isinstance(one, Raw):
            mark = f"\ue000{len(marks)}\ue001"
            marks[f'"{mark}"'] = str(one)
            return mark
        if isinstance(one, dict):
            return {key: marked(item) for key, item in one.items()} if len(one) < 64 else one
        if isinstance(one, list):
            return [marked(item) for item in one] if len(one) < 64 else one
        return one

    try:
        text = json.dumps(marked(value), ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        return b""
    for mark, raw in marks.items():
        text = text.replace(mark, raw)
    return text.encode()
