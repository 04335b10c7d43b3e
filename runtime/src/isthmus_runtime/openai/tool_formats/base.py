"""What all formats of tool calls share: finding calls in text that comes in pieces. Pure.

The rule: a call is given when it is whole, names a tool that was offered, and has arguments that are a JSON object.
What is not that is text, from its first character on. So arguments are always valid JSON, and no text is lost but white
space beside calls.

A client can have a model write any text. So the work grows with its length alone: see `json_end`; nothing is copied or
gone over again for each piece, and what is looked at beside JSON is bounded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from .json_end import NEVER, JsonEnd

_PIECES = 256


def collect(pieces: list[str], piece: str) -> None:
    """Add to a text that comes in many pieces; they are joined from time to time: one takes 60 bytes by itself."""
    pieces.append(piece)
    if len(pieces) > _PIECES:
        pieces[:] = ["".join(pieces)]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What the model wants to be called."""

    name: str
    arguments: str
    """Text of a JSON object."""


@dataclass(frozen=True, slots=True)
class Read:
    """A beginning of the text after an opening: these calls, up to `end`. No calls: it is text."""

    end: int
    calls: tuple[ToolCall, ...]


REJECTED = Read(0, ())

MAX_SPACE = 256
"""Characters of white space before and after a call's JSON."""
_SPACE = re.compile(rf"\s{{0,{MAX_SPACE}}}+")
_ANY_SPACE = re.compile(r"\s*+")


class ToolParser:
    """Base of the formats. Says where calls may begin; `read` says what follows."""

    markers: ClassVar[tuple[str, ...]] = ()
    """Open a call wherever they are. Each holds a character that JSON has in strings alone, and neither a quote nor a
    backslash."""
    first_markers: ClassVar[tuple[str, ...]] = ()
    """Open a call where the answer begins, and after a call."""
    bare: ClassVar[str] = ""
    """Characters that begin a call there without a marker, and belong to it."""
    separator: ClassVar[str] = ""
    """May stand between two calls: one character."""

    def __init__(self, names: Iterable[str]) -> None:
        """`names`: of the tools that were offered."""
        self._names = frozenset(names)
        self._marker = re.compile("|".join(map(re.escape, self.markers))) if self.markers else None
        self._longest = max(map(len, (*self.markers, *self.first_markers)), default=0)
        self._buffer = ""
        self._at = 0
        """Where what is not yet done with begins in it."""
        self._opening: str | None = None
        """While inside: what has opened it."""
        self._held: list[str] = []
        """White space that belongs to a call if one follows, and a separator with what is around it."""
        self._separated = False
        """A separator is among it."""
        self._first = True
        """Nothing but calls has come so far, or since the last call."""
        self._after_call = False
        self._json_end = JsonEnd()

    @property
    def held(self) -> int:
        """Characters of which it is not certain yet what they are."""
        return len(self._buffer) + sum(map(len, self._held))

    def feed(self, text: str) -> list[str | ToolCall]:
        """Text and calls that are certain after more text, in order."""
        buffer, self._buffer = self._buffer, ""
        buffer += (
            text  # in its place, as nothing else refers to it: a call's text may come in a hundred thousand pieces
        )
        self._buffer = buffer
        return self._run(last=False)

    def finish(self) -> list[str | ToolCall]:
        """No text follows."""
        return self._run(last=True)

    def read(self, text: str, start: int, last: bool) -> Read | None:
        """Calls that `text` has from `start` on, which follows an opening; None: more is needed to say. With `last`,
        None says that there is none. Asked again for each piece of text."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------------------------------- for formats

    def value_end(self, text: str, start: int) -> int | None:
        """Where the JSON object or list ends that begins at `start`; None: not yet; NEVER (-1): it is none. Asked
        again, goes on from there."""
        return self._json_end.find(text, start)

    def calls_at(self, text: str, start: int, last: bool, opens: str, close: str = "") -> Read | None:
        """As of `read`: the calls of the JSON value that follows, if it begins with one of `opens`, and `close`, which
        may be missing: some models end their turn instead."""
        begin = skip_space(text, start)
        if begin == len(text):
            return None
        end = self.value_end(text, begin) if text[begin] in opens else NEVER
        if end is None or end == NEVER:
            return None if end is None else REJECTED
        calls_end = end
        if close:
            after = skip_space(text, end)
            rest = text[after : after + len(close)]
            if not last and rest != close and close.startswith(rest):
                return None
            calls_end = after + len(close) if rest == close else end
        return Read(calls_end, self.calls_in(text[begin:end]))

    def calls_in(self, source: str) -> tuple[ToolCall, ...]:
        """The calls that a JSON object or list of objects stands for; none unless all are calls."""
        try:
            value = json.loads(source, strict=False)
        except (ValueError, RecursionError):
            return ()
        found = [self.call_of(v) for v in (value if isinstance(value, list) else [value])]
        calls = tuple(c for c in found if c is not None)
        return calls if len(calls) == len(found) else ()

    def call_of(self, value: Any) -> ToolCall | None:
        """The call that an object with name and arguments (or parameters) stands for."""
        if not isinstance(value, dict):
            return None
        if isinstance(value.get("function"), dict):
            value = value["function"]
        return self.call(value.get("name"), value.get("arguments", value.get("parameters", {})))

    def call(self, name: Any, arguments: Any) -> ToolCall | None:
        """A call, if the tool was offered and the arguments are an object, or its JSON text."""
        if not isinstance(name, str) or name not in self._names:
            return None
        try:
            if isinstance(arguments, str):
                arguments = _loads(arguments)
            if not isinstance(arguments, dict):
                return None
            written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            written.encode()
        except (ValueError, RecursionError):
            # A number may be too large to be anything but infinity, and escapes may be half of a surrogate pair.
            return None
        return ToolCall(name, written)

    # ----------------------------------------------------------------------------------------------------- internals

    def _run(self, *, last: bool) -> list[str | ToolCall]:
        parts: list[str | ToolCall] = []
        while self._inside(parts, last) if self._opening is not None else self._outside(parts, last):
            pass
        if last:
            if self._held:
                parts.append("".join(self._held))
            self._held = []
        if self._at:
            self._buffer, self._at = self._buffer[self._at :], 0
        return parts

    def _inside(self, parts: list[str | ToolCall], last: bool) -> bool:
        found = self.read(self._buffer, self._at, last)
        if found is None and not last:
            return False
        opening, self._opening = self._opening, None
        if found is None or not found.calls:
            assert opening is not None
            self._first = False
            self._text(parts, opening)
            return True
        parts += found.calls
        self._at = found.end
        self._held, self._separated = [], False
        self._first = self._after_call = True
        return True

    def _outside(self, parts: list[str | ToolCall], last: bool) -> bool:
        if self._first and (more := self._begin(last)) is not None:
            return more
        buffer = self._buffer
        found = None if self._marker is None else self._marker.search(buffer, self._at)
        if found is not None:
            self._text(parts, buffer[self._at : found.start()])
            self._enter(found[0], found.end())
            return True
        end = buffer[max(self._at, len(buffer) - self._longest) :]
        keep = 0 if last else max((overlap(end, m) for m in self.markers), default=0)
        self._text(parts, buffer[self._at : len(buffer) - keep])
        self._at = len(buffer) - keep
        return False

    def _begin(self, last: bool) -> bool | None:
        """`_outside`, where a call may begin with or without a marker; None: it does not."""
        buffer, begin = self._buffer, self._at
        self._at = at = _ANY_SPACE.match(buffer, begin).end()  # type: ignore[union-attr]  # it may match nothing
        if not self._after_call or self._separated:
            collect(self._held, buffer[begin:at])
        rest = buffer[at : at + self._longest + 1]
        if not rest:
            return False
        for marker in self.first_markers:
            if rest.startswith(marker):
                self._enter(marker, at + len(marker))
                return True
        if rest[0] in self.bare:
            self._enter("", at)
            return True
        if self._after_call and not self._separated and rest[0] == self.separator:
            self._separated = True
            self._held.append(self.separator)
            self._at += 1
            return True
        if not last and any(len(rest) < len(m) and m.startswith(rest) for m in (*self.first_markers, *self.markers)):
            return False
        self._first = False
        return None

    def _enter(self, opening: str, at: int) -> None:
        self._opening, self._at = opening, at
        self._json_end = JsonEnd()

    def _text(self, parts: list[str | ToolCall], text: str) -> None:
        shown = text.rstrip()
        if not shown:
            if text and (self._separated or not self._after_call):
                collect(self._held, text)
            return
        held = "".join(self._held)
        self._held = [text[len(shown) :]] if len(shown) < len(text) else []
        parts.append(held + shown if held or not self._after_call else shown.lstrip())
        self._after_call = self._separated = False


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`, and is not all of it."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


def skip_space(text: str, start: int) -> int:
    """Where white space that begins at `start` ends, after MAX_SPACE characters at the latest."""
    return _SPACE.match(text, start).end()  # type: ignore[union-attr]  # it may match nothing


def _loads(source: str) -> Any:
    """A list or an object. Raises ValueError for anything else, and RecursionError."""
    text = source.strip(" \t\r\n")
    if JsonEnd().find(text, 0) != len(text):
        raise ValueError
    return json.loads(text, strict=False)
