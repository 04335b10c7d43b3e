"""What is read of the API server's answers, so that no object in them takes more memory than it is worth.

Whoever may write objects of a watched kind decides how large they are, and of what: 1.4 MB of empty rules in a
NetworkPolicy are 30 MB as dictionaries, and a page of a list is read at once, after each start anew. So one large
answer is read at a time, of a list one object after the other as they come, and what is heavier than all that is made
for a service is cut down to what says whose it is.

Nor may an answer end the operator: what is no JSON object, such as a proxy's page, is a failed connection, and a watch
that tells of an error begins anew with a list.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from array import array
from collections.abc import AsyncIterator
from itertools import accumulate
from time import perf_counter
from typing import Any

import aiohttp

from ..api.limits import MOST_DEPTH, MOST_FIELDS, MOST_ITEMS, MOST_VALUES
from ..plan.ownership import TEMPLATE_MARK, is_ours
from ..render.names import READ_LABELS

HEAVY = 2 * 1024 * 1024
"""Bytes that an object takes as dictionaries, about. The largest that a spec can ask for takes two thirds of it."""
SMALL = 256 * 1024
"""Bytes of an answer that waits for no other."""
_LONG_S = 0.02
MOST_OWNERS = 16
MOST_NAME = 253
_VALUE = 72
"""Bytes of the smallest value that is not shared, an empty mapping or list, and of its place in another."""
_IDENTITY = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp")
_OWNER = ("apiVersion", "kind", "name", "uid", "controller")
_FAR, _WIDE = re.compile(r"\\ud[89ab]"), re.compile(r"\\u(?!00)")
_TEXT = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_OUTER = re.compile(rb'(?:[^"{}\[\]]++|"[^"\\]*+")*+')
_INNER = re.compile(rb'(?:[^"{}\[\]]++|"[^"\\]*+"|\{\}|\[\])*+')
"""What lies before the end of a text, and before the next mark out of texts: of an item with less to stop at."""
_STEPS = bytes.maketrans(b"{[}]", b"\x01\x01\xff\xff")
_OTHERS = bytes(one for one in range(256) if one not in b"{[}]")
"""Marks as steps in depth, without all else."""
_ITEMS = re.compile(rb'(?<!\\)"items"\s*:\s*\[\Z')
_KIND = re.compile(rb'"kind"\s*:\s*"([A-Za-z]*?)(?:List)?"')
_BRIEF_S = 1.0
"""A watch that ends sooner and has told nothing is none."""
_FORGOTTEN = json.dumps({"type": "ERROR", "object": {"kind": "Status", "code": 410}}).encode()
"""What makes kopf list anew, after a pause; of other errors it ends."""
_CHANGE = re.compile(rb'\{"type":"(?!ERROR)[A-Z]+","object":\{')
_TOO_OLD = re.compile(rb'"code"\s*:\s*410\b')

Object = dict[str, Any]
_log = logging.getLogger(__name__)


class Reader:
    """Reads all answers of one API server."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def read(self, content: aiohttp.StreamReader) -> Any:
        """The decoded body; aiohttp.ClientPayloadError where it is no JSON object. Of a large one the rest waits in the
        socket while another is read. Its length is not known before: the API server tells that of few answers."""
        try:
            body = await self._read(content)
        except ValueError as error:
            raise aiohttp.ClientPayloadError(f"what came is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise aiohttp.ClientPayloadError(f"what came is no JSON object: {str(body)[:80]}")
        return body

    async def _read(self, content: aiohttp.StreamReader) -> Any:
        begin = bytearray()
        async for part in content.iter_any():
            begin += part
            if len(begin) > SMALL:
                break
        else:
            return json.loads(begin)
        async with self._turn:
            body = Body()
            body.feed(bytes(begin))
            async for part in content.iter_any():
                before = perf_counter()
                body.feed(part)
                if (took := perf_counter() - before) > _LONG_S:
                    await asyncio.sleep(took)  # others have as much of the loop as a heavy item: the lease is theirs
            return body.end()

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
        rest, came, begun = bytearray(), False, perf_counter()
        async for data in self._content.iter_chunked(size):
            *lines, last = data.split(b"\n")
            for line in lines:
                yield told(bytes(rest + line)) + b"\n"
                rest.clear()
                came = True
            rest += last
        # The API server ends each event by a newline. After what is none, or nothing at all, kopf asks again at once;
        # but that is usual where nothing has happened for minutes.
        if rest or (not came and perf_counter() - begun < _BRIEF_S):
            yield _FORGOTTEN + b"\n"


def told(line: bytes) -> bytes:
    """An event of a watch, with its object cut where it is heavy. One that tells of an error, or is none, becomes one
    that has the watch begin anew."""
    begin = line[:64].translate(None, b" \t\r")
    if not begin:
        return line
    if not _CHANGE.match(begin) or b'"metadata"' not in line:
        if not _TOO_OLD.search(line):
            _log.warning("a watch tells of no change, and begins anew: %s", line[:300].decode(errors="replace"))
        return _FORGOTTEN
    weighs = weight(line)
    if weighs <= HEAVY:
        return line
    event = json.loads(line)
    event["object"] = cut(event["object"], event["object"].get("kind", ""), weighs)
    return json.dumps(event).encode()


class Body:
    """JSON that comes in pieces: of a list each item is decoded as soon as it is there, and cut. The API server writes
    `<` and its like as six bytes, so that a page of ten objects may be 94 MB, and as text four times as much."""

    def __init__(self) -> None:
        self._frame = bytearray()
        """What has come but the items, each of which is `[]` here."""
        self._item: bytearray | None = None
        """Of the item that has begun."""
        self._found: list[Any] = []
        self._depth = 0
        self._lists_items = False
        """Within the list `items` of the body."""
        self._in_text = False
        self._rest = b""
        """A backslash at the end of a piece."""

    def feed(self, piece: bytes) -> None:
        """ValueError for an item that is not JSON."""
        data = self._rest + piece
        self._rest = b""
        if self._item is not None and self._goes_on(data):
            return
        begin = at = 0
        while at < len(data):
            if self._in_text:
                at = _end(_TEXT, data, at)
                if data[at:] == b"\\":
                    data, self._rest = data[:at], b"\\"
                elif at < len(data):
                    at, self._in_text = at + 1, False
                continue
            at = _end(_OUTER if self._item is None else _INNER, data, at)
            mark, at = data[at : at + 1], at + 1
            if mark == b'"':
                self._in_text = True
            elif mark in (b"{", b"["):
                if self._lists_items and self._depth == 2:
                    self._frame += data[begin : at - 1] + b"[]"
                    self._item, begin = bytearray(), at - 1
                elif mark == b"[" and self._depth == 1:
                    self._frame += data[begin:at]
                    self._lists_items, begin = _ITEMS.search(self._frame, max(0, len(self._frame) - 64)) is not None, at
                self._depth += 1
            elif mark:
                self._depth -= 1
                if self._item is not None and self._depth == 2:
                    self._item += data[begin:at]
                    self._take(bytes(self._item))
                    self._item, begin = None, at
                elif self._depth == 1:
                    self._lists_items = False
        (self._frame if self._item is None else self._item).extend(data[begin:])

    def _goes_on(self, data: bytes) -> bool:
        """Take a piece in whose midst the item does not end, without looking at each mark in Python."""
        half = (len(data) - len(data.rstrip(b"\\"))) % 2  # of an escape
        data, rest = (data[:-1], data[-1:]) if half else (data, b"")
        parts = data.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        marks = array("b", b"".join(parts[self._in_text :: 2]).translate(_STEPS, _OTHERS))
        if min(accumulate(marks, initial=self._depth)) <= 2:
            return False
        assert self._item is not None, "asked within one"
        self._item += data
        self._rest, self._depth = rest, self._depth + sum(marks)
        self._in_text ^= len(parts) % 2 == 0
        return True

    def end(self) -> Any:
        """The body. ValueError where it is not JSON."""
        if self._item is not None or self._rest:
            raise json.JSONDecodeError("the body ends within an item", "", 0)
        body = json.loads(self._frame)
        if self._found:
            found = iter(self._found)
            body["items"] = [next(found) if one == [] else one for one in body["items"]]
        return body

    def _take(self, text: bytes) -> None:
        item = json.loads(text)
        if isinstance(item, dict) and (weighs := weight(text)) > HEAVY:
            kind = _KIND.search(self._frame)
            item = cut(item, item.get("kind") or (kind[1].decode() if kind else ""), weighs)
        self._found.append(item)


def _end(of: re.Pattern[bytes], data: bytes, at: int) -> int:
    found = of.match(data, at)
    assert found is not None, "it matches nothing, too"
    return found.end()


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
    """`weight` of what `json.dumps` makes, which tells of such letters: with one beyond U+FFFF (an escape of two parts)
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
