"""What is read of the API server's answers, so that no object in them takes more memory than it is worth.

Whoever may write objects of a watched kind decides how large they are, and of what: 1.4 MB of empty rules in a
NetworkPolicy are 30 MB as dictionaries, and a page of a list is read at once, after each start anew. So one large
answer is read at a time, of a list one object after the other, and what is heavier than all that is made for a service
is cut down to what says whose it is.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from ..api.limits import MOST_DEPTH, MOST_FIELDS, MOST_ITEMS, MOST_VALUES
from ..plan.ownership import TEMPLATE_MARK, is_ours
from ..render.names import READ_LABELS

HEAVY = 2 * 1024 * 1024
"""Bytes that an object takes as dictionaries, about. The largest that a spec can ask for takes two thirds of it."""
SMALL = 256 * 1024
"""Bytes of an answer that waits for no other."""
MOST_OWNERS = 16
MOST_NAME = 253
_VALUE = 72
"""Bytes of the smallest value that is not shared, an empty mapping or list, and of its place in another."""
_IDENTITY = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp")
_OWNER = ("apiVersion", "kind", "name", "uid", "controller")
_SPACE = re.compile(r"[ \t\r\n]*")
_FAR, _WIDE = re.compile(r"\\ud[89ab]"), re.compile(r"\\u(?!00)")
_DECODE = json.JSONDecoder().raw_decode

Object = dict[str, Any]


class Reader:
    """Of all answers of one API server."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def read(self, content: aiohttp.StreamReader) -> Any:
        """The decoded body; ValueError where it is not JSON. Of a large one the rest waits in the socket while another
        is read. Its length is not known before: the API server tells that of few answers."""
        body = bytearray()
        async for part in content.iter_any():
            body += part
            if len(body) > SMALL:
                break
        else:
            return json.loads(body)
        async with self._turn:
            async for part in content.iter_any():
                body += part
            return decoded(body.decode())

    def response(self) -> type[aiohttp.ClientResponse]:
        """What kopf's session is to make of answers: lists by `read`, and each line of a watch cut."""
        reader = self

        class Response(aiohttp.ClientResponse):
            async def start(self, connection: aiohttp.connector.Connection) -> aiohttp.ClientResponse:
                await super().start(connection)
                self.content = _Lines(self.content)  # type: ignore[assignment]
                return self

            async def json(self, **_: Any) -> Any:
                return await reader.read(self.content)

        return Response


class _Lines:
    """A stream of which `iter_chunked` gives lines, each cut where it is heavy."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        rest = b""
        async for data in self._content.iter_chunked(size):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield told(line) + b"\n"
        if rest:
            yield told(rest)


def told(line: bytes) -> bytes:
    """An event of a watch, with its object cut where it is heavy."""
    weighs = weight(line)
    if weighs <= HEAVY:
        return line
    event = json.loads(line)
    event["object"] = cut(event["object"], event["object"].get("kind", ""), weighs)
    return json.dumps(event).encode()


def decoded(text: str) -> Any:
    """A body. The items of a list are decoded and cut one after the other."""
    at = _past_space(text, 0)
    if not text.startswith("{", at):
        return json.loads(text)
    found: Object = {}
    at = _past_space(text, at + 1)
    ended = text.startswith("}", at)
    while not ended:
        name, at = _DECODE(_with(text, '"', at), at)
        at = _past(":", text, at)
        if name == "items" and text.startswith("[", at):
            found[name], at = _items(text, at + 1, str(found.get("kind", "")).removesuffix("List"))
        else:
            found[name], at = _DECODE(text, at)
        at, ended = _next(text, at, "}")
    if _past_space(text, at + 1) != len(text):
        raise json.JSONDecodeError("extra data", text, at + 1)
    return found


def _items(text: str, at: int, kind: str) -> tuple[list[Any], int]:
    found = []
    at = _past_space(text, at)
    ended = text.startswith("]", at)
    while not ended:
        item, end = _DECODE(text, at)
        if isinstance(item, dict) and (weighs := weight(text, at, end)) > HEAVY:
            item = cut(item, item.get("kind") or kind, weighs)
        found.append(item)
        at, ended = _next(text, end, "]")
    return found, at + 1


def _next(text: str, at: int, end: str) -> tuple[int, bool]:
    """Where the next member is, or the end of them."""
    at = _past_space(text, at)
    return (at, True) if text.startswith(end, at) else (_past(",", text, at), False)


def _with(text: str, mark: str, at: int) -> str:
    if not text.startswith(mark, at):
        raise json.JSONDecodeError(f"expecting {mark}", text, at)
    return text


def _past_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    assert space is not None, "it matches nothing, too"
    return space.end()


def _past(mark: str, text: str, at: int) -> int:
    at = _past_space(text, at)
    return _past_space(_with(text, mark, at), at + 1)


def weight(text: str | bytes, begin: int = 0, end: int | None = None) -> int:
    """What JSON, as text or bytes, takes as Python objects, about: up to 1.7 times as much where all is in small
    objects, and up to four times where texts have other than Latin letters."""
    end = len(text) if end is None else end
    if isinstance(text, str):
        values = sum(text.count(mark, begin, end) for mark in ("{", "[", ","))
    else:
        values = sum(text.count(mark, begin, end) for mark in (b"{", b"[", b","))
    return end - begin + _VALUE * values


def weight_of_dumped(text: str) -> int:
    """The same of what `json.dumps` makes, which tells of such letters: with one beyond U+FFFF (an escape of two parts)
    each character of a text takes four bytes, with one beyond U+00FF two. As if all were one text."""
    more = 3 if _FAR.search(text) else 1 if _WIDE.search(text) else 0
    return weight(text) + more * len(text)


def cut(body: Object, kind: str, weighs: int) -> Object:
    """A heavy object, of this weight, without metadata that nobody reads, and without its content if it is heavy then,
    too: which is told without making text of that, as it may be edited often.

    What is left of a workload can be looked at as one; a service's spec is refused as too large.
    """
    meta = body.get("metadata") or {}
    kept = _kept(meta)
    ours = [entry for entry in meta.get("managedFields") or () if is_ours(entry) and entry.get("operation") == "Apply"]
    lean = {**body, "metadata": {**kept, "managedFields": ours}}
    if weighs - weight(_text(meta)) + weight(_text(lean["metadata"])) <= HEAVY:
        return lean
    return _bare(body, kind, kept)


def bare(body: Object, kind: str) -> Object:
    """What says whose an object is, and of a workload that it is one."""
    return _bare(body, kind, _kept(body.get("metadata") or {}))


def _kept(meta: Object) -> Object:
    kept: Object = {key: meta[key] for key in _IDENTITY if key in meta}
    for field, known in (("labels", READ_LABELS), ("annotations", (TEMPLATE_MARK,))):
        if there := {key: value for key, value in (meta.get(field) or {}).items() if key in known}:
            kept[field] = there
    kept["ownerReferences"] = [
        {key: owner[key] for key in _OWNER if key in owner}
        for owner in (meta.get("ownerReferences") or ())[:MOST_OWNERS]
        if len(owner["name"]) <= MOST_NAME
    ]
    return kept


def _bare(body: Object, kind: str, kept: Object) -> Object:
    out: Object = {key: body[key] for key in ("apiVersion", "kind") if key in body} | {"metadata": kept}
    spec = body.get("spec") or {}
    if kind == "InferenceService":
        out["spec"] = clipped(spec)
    elif kind in ("Deployment", "StatefulSet"):
        picked = ((spec.get("selector") or {}).get("matchLabels") or {}).items()
        labels = {key: value for key, value in picked if key in READ_LABELS}
        template = {"metadata": {"labels": labels}, "spec": {"containers": []}}
        out["spec"] = {"selector": {"matchLabels": labels}, "template": template}
        out["spec"] |= {key: spec[key] for key in ("replicas", "podManagementPolicy") if key in spec}
    elif kind == "RoleScaler":  # small, by its schema
        out["spec"] = spec
    return out


def _text(value: Any) -> str:
    """As the API server writes it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def clipped(spec: Any) -> Any:
    """A spec that is beyond `limits`, so far as that can be seen in what is left."""
    return _clipped(spec, MOST_DEPTH + 1, [MOST_VALUES + 1])


def _clipped(value: Any, depth: int, left: list[int]) -> Any:
    """left: values that may follow."""
    left[0] -= 1
    if depth <= 0 or left[0] <= 0:
        return None if isinstance(value, dict | list) else value
    if isinstance(value, dict):
        several = list(value.items())[: MOST_FIELDS + 1]
        return {key: _clipped(one, depth - 1, left) for key, one in several if left[0] > 0}
    if isinstance(value, list):
        return [_clipped(one, depth - 1, left) for one in value[: MOST_ITEMS + 1] if left[0] > 0]
    return value
