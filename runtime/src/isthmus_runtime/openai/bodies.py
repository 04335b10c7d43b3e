"""From the bytes of a body to a checked record of parameters, or an error that tells every problem by its name.

A parameter is either honoured or refused by name; none is ignored. JSON null means "not given".
"""

from __future__ import annotations

import codecs
import json
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from ..errors import InvalidRequest
from ..request import WrittenIds
from .logit_options import MAX_BIASES
from .long_lists import LongLists
from .problems import MAX_NAME, MAX_PROBLEMS, invalid

HINTS: Mapping[str, type | tuple[type, ...]] = {
    "metadata": dict,
    "service_tier": str,
    "prompt_cache_key": str,
    "prompt_cache_retention": str,
    "safety_identifier": str,
    "user": str,
    "request_id": str,
}
"""Without effect on the answer, whatever their values."""
MAX_LISTED_FIELDS = 4096
"""Of all objects in a list together; one of documents has as many as it has documents."""

MOST_CONTAINERS, _BYTES_OF_A_CONTAINER = 1 << 17, 64
MOST_ITEMS, _BYTES_OF_AN_ITEM = 1 << 20, 16
"""Lists and objects in a body, by their brackets, and values, by their commas: so many, and one more for as many
bytes."""
MOST_OTHERS, _BYTES_OF_OTHERS = 1 << 19, 64
"""Values that are in no long list of token ids: no other thread runs while they are made."""
_MANY_ITEMS = 1 << 15
"""Fewer are made in some milliseconds, wherever they are."""
MOST_QUOTES, _BYTES_OF_A_QUOTE = 1 << 18, 64
"""Quotation marks, two for each key and text: a key takes four times as long to be made as a number."""
_MOST_ESCAPES = 8
"""Backslashes before one that are looked at; with more it counts."""
_LARGE = 1 << 16
"""Bytes of a body that is read alone."""
MOST_IN_A_TEXT = 1 << 20
"""Characters of a text that holds JSON: a call in an answer has half of it, and spaces may be added when it is told."""

_SPACE, _NUMBERS = b" \t\r\n", b"0123456789,"

_R = TypeVar("_R", bound=BaseModel)


_reading = threading.Lock()


def json_object(body: bytes) -> dict[str, Any]:
    """A body that must be a JSON object. InvalidRequest says where it is not.

    No other thread runs while one is read, which of several large ones would follow one another without a break.
    """
    if len(body) <= _LARGE:
        return _json_object(body)
    with _reading:
        return _json_object(body)


def _json_object(body: bytes) -> dict[str, Any]:
    _check_values(body)
    body = body.removeprefix(codecs.BOM_UTF8)
    if len(body) > _MANY_ITEMS and body.count(b",") > _MANY_ITEMS:
        lists = LongLists(body)
        if lists:
            _check_others(lists.rest, len(body))
            try:
                value = lists.read()
            except ValueError:
                value = None  # what follows says what is wrong, if anything is
            if isinstance(value, dict):
                return value
        _check_others(body, len(body))
    try:
        fast = from_json(body, allow_inf_nan=False)
    except ValueError as e:
        if "recursion limit exceeded" in str(e):  # 200 levels; what looks at a body goes down by calling itself
            raise InvalidRequest("the body is nested too deeply") from e
        fast = None  # what follows is slower, and says what is wrong
    if isinstance(fast, dict):
        return fast
    try:
        data = _DECODER.decode(body.decode("utf-8"))
        if b"\\ud" in body or b"\\uD" in body:
            # A lone surrogate is legal in JSON, but is no text.
            json.dumps(data, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as e:
        raise InvalidRequest(f"the body is not valid JSON: {e.msg} at line {e.lineno}, column {e.colno}") from e
    except UnicodeDecodeError as e:
        raise InvalidRequest(f"the body is not valid UTF-8: byte {e.object[e.start]:#04x} at offset {e.start}") from e
    except UnicodeEncodeError as e:
        raise InvalidRequest(
            "the body holds half of a surrogate pair (\\ud800 to \\udfff); send whole characters"
        ) from e
    except InvalidRequest:
        raise
    except ValueError as e:  # of int(): more digits than it converts
        raise InvalidRequest("the body holds a number of several thousand digits; shorten it") from e
    except RecursionError as e:
        raise InvalidRequest("the body is nested too deeply") from e
    if not isinstance(data, dict):
        raise InvalidRequest(f"the body is a JSON {type(data).__name__}, expected an object")
    return data


class TextsOfJson:
    """JSON that texts of one body hold, as arguments of calls do. Its quotation marks are escaped in the body and not
    counted there: what all such texts make is counted together, as a body's own values are."""

    def __init__(self) -> None:
        self._size, self._found = 0, [0] * len(_COUNTED)

    def read(self, text: str, param: str) -> Any:
        """The value. InvalidRequest, naming `param`, for too long a text or too many values, before it is read;
        ValueError where it is no JSON."""
        if len(text) > MOST_IN_A_TEXT:
            raise InvalidRequest(
                f"{param}: {len(text)} characters, at most {MOST_IN_A_TEXT} are allowed; shorten it", param=param
            )
        raw = text.encode()
        self._size += len(raw)
        for i, (count, usual, apart, each, what) in enumerate(_COUNTED):
            self._found[i] += count(raw, -1)
            if self._found[i] > (most := usual + self._size // apart):
                raise InvalidRequest(
                    f"{param}: the texts of JSON up to here have {self._found[i] // each} {what}; at most "
                    f"{most // each} are allowed in {self._size} bytes; send less",
                    param=param,
                )
        if len(raw) <= _LARGE:
            return from_json(raw)
        with _reading:
            return from_json(raw)


def least_written(value: Any, most: int) -> int:
    """How many characters `value` has as JSON at the least, counted until they are more than `most`: what is far too
    long is not to be written to be measured, which lets no other thread run."""
    found, left = 0, [value]
    while left and found <= most:
        value = left.pop()
        if isinstance(value, str):
            found += len(value) + 2
        elif isinstance(value, (list, tuple)):
            found += max(2, 2 * len(value))
            left += value if found <= most else ()
        elif isinstance(value, Mapping):
            found += max(2, 6 * len(value))
            if found <= most:
                found += sum(map(len, value))
                left += value.values()
        else:
            found += 1 + (max(0, value.bit_length() - 1) // 4 if isinstance(value, int) else 0)
    return found


def ids_as_written(body: bytes, data: Mapping[str, Any], name: str) -> WrittenIds | None:
    """The value of `name` in `data`, which `json_object` has made of this body, if it is a list of numbers without
    sign, point and exponent whose place in the body is certain; else None.

    Certain: without escapes a name is spelt as it is, and what is spelt once is the one that is in `data`.
    """
    value, key = data.get(name), b'"%b"' % name.encode()
    if not isinstance(value, list) or not value or b"\\" in body or body.count(key) != 1:
        return None
    begin = body.index(b"[", body.index(key))
    written = body[begin : body.index(b"]", begin) + 1].translate(None, _SPACE)
    if written.translate(None, _NUMBERS) != b"[]":
        return None
    ids = WrittenIds(value)
    ids.json = written
    return ids


def _check_values(body: bytes) -> None:
    """Raise InvalidRequest for more values than any request has. Each takes tens of bytes, and no other thread runs
    while they are made; marks inside of texts count as well, and texts have few for their length."""
    for count, usual, apart, each, what in _COUNTED:
        most = usual + len(body) // apart
        if len(body) > most and (found := count(body, most)) > most:
            raise InvalidRequest(
                f"the body has {found // each} {what}; at most {most // each} are allowed in {len(body)} bytes; "
                "send less"
            )


def _check_others(rest: bytes, size: int) -> None:
    most = MOST_OTHERS + size // _BYTES_OF_OTHERS
    if (found := rest.count(b",")) > most:
        raise InvalidRequest(
            f"the body has {found} commas outside of long lists of token ids (those inside of texts count); at most "
            f"{most} are allowed in {size} bytes; send less"
        )


def _quotes(body: bytes, most: int) -> int:
    """How many quotation marks begin or end a text; those inside of texts, which are escaped, are told apart only where
    all are more than `most`."""
    found = body.count(b'"')
    if found > most:
        for escapes in range(1, _MOST_ESCAPES + 1):
            found += (-1) ** escapes * body.count(b"\\" * escapes + b'"')
    return found


_COUNTED: tuple[tuple[Callable[[bytes, int], int], int, int, int, str], ...] = (
    (
        lambda body, most: body.count(b"[") + body.count(b"{"),
        MOST_CONTAINERS,
        _BYTES_OF_A_CONTAINER,
        1,
        "brackets [ and { (those inside of texts count)",
    ),
    (lambda body, most: body.count(b","), MOST_ITEMS, _BYTES_OF_AN_ITEM, 1, "commas (those inside of texts count)"),
    (_quotes, MOST_QUOTES, _BYTES_OF_A_QUOTE, 2, "keys and texts"),
)
"""What is counted, how many are allowed, one more for how many bytes, and how many marks one thing has."""


def _refuse_constant(name: str) -> None:
    raise InvalidRequest(f"the body holds {name}, which is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def parsed(model: type[_R], data: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...]]) -> _R:
    """`data` as `model`. `neutral`: parameters beside the model's, by the values that ask for nothing. InvalidRequest
    tells every problem and names the parameter of the first."""
    problems: list[tuple[str, str]] = []
    known = _names(model)
    given = {}
    unknown = 0
    for name, value in data.items():
        if value is None:
            continue
        if name in HINTS:
            if not isinstance(value, HINTS[name]):
                problems.append((name, f"{name}: must be a {'string' if HINTS[name] is str else 'JSON object'}"))
        elif name in neutral:
            _check_neutral(name, value, neutral[name], problems)
        elif name in known:
            if known[name] and (most := _too_many_fields(value)):
                problems.append((name, f"{name}: has more than {most} fields"))
            else:
                given[name] = value
        else:
            # Not left to pydantic, which makes a record of each, all at once and with the interpreter's lock held.
            unknown += 1
            if unknown <= MAX_PROBLEMS:
                shown = name[:MAX_NAME]
                problems.append((shown, f"{shown}: unknown parameter; remove it"))
    try:
        request = model.model_validate(given)
    except ValidationError as e:
        found = e.errors(include_url=False, include_input=False, include_context=False)
        problems += [_problem(error["loc"], error["type"], error["msg"]) for error in found]
    if problems:
        raise invalid(problems, more=max(0, unknown - MAX_PROBLEMS))
    return request


@cache
def _names(model: type[BaseModel]) -> Mapping[str, bool]:
    """Those of its fields, and whether pydantic looks into their values. Kept: it looks for them each time."""
    return {name: field.annotation is not Any for name, field in model.model_fields.items()}


def _too_many_fields(value: object) -> int:
    """The limit that objects in a value are beyond; 0: none. Each field that is wrong would cost a kilobyte: all are
    looked at before they are counted."""
    if isinstance(value, dict):
        inner = value.get("json_schema")
        largest = max(len(value), len(inner) if isinstance(inner, dict) else 0)
        return MAX_BIASES if largest > MAX_BIASES else 0
    if isinstance(value, list):
        fields = sum(len(item) for item in value if isinstance(item, dict))
        return MAX_LISTED_FIELDS if fields > MAX_LISTED_FIELDS else 0
    return 0


def _check_neutral(name: str, value: object, accepted: tuple[object, ...], problems: list[tuple[str, str]]) -> None:
    if value in accepted:
        return
    fix = f"remove it or set it to {' or '.join(json.dumps(a) for a in accepted)}" if accepted else "remove it"
    problems.append((name, f"{name}: not supported; {fix}"))


def _problem(loc: tuple[int | str, ...], kind: str, message: str) -> tuple[str, str]:
    if kind == "value_error":  # from our own validators: the text begins with the parameter
        text = message.removeprefix("Value error, ")
        return text.partition(":")[0].partition(" ")[0], text
    # Positions inside a union (`stop.list[...]`) are pydantic's, not the client's.
    param = ".".join(str(p) for p in loc if isinstance(p, int) or p.isidentifier())
    for kind_name in (".str", ".list"):
        param = param.removesuffix(kind_name)
    if kind == "extra_forbidden":
        return param, f"{param}: unknown parameter; remove it"
    if kind == "missing":
        return param, f"{param}: required"
    return param, f"{param}: {message[0].lower()}{message[1:]}"


def _neutral_schema(neutral: Mapping[str, tuple[object, ...]]) -> dict[str, Any]:
    """JSON schema of these parameters: their neutral values, or null."""
    text = "Not implemented; accepted only with values that have no effect."
    found: dict[str, Any] = {n: {"enum": [*values, None], "description": text} for n, values in neutral.items()}
    for name, kind in HINTS.items():
        found[name] = {"type": ["object" if kind is dict else "string", "null"], "description": "Without effect."}
    return found


def hints(neutral: Mapping[str, tuple[object, ...]]) -> Callable[[dict[str, Any]], None]:
    """Adds parameters that are looked at before the model is to its JSON schema."""
    return lambda schema: schema["properties"].update(_neutral_schema(neutral))
