"""What all formats of tool calls share: finding calls in text that comes in pieces. Pure.

The rule: a call is given when it is whole, names a tool that was offered, and has arguments that are a JSON object.
What is not that is text, from its first character on. So arguments are always valid JSON, and no text is lost but white
space beside calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar


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

_MOST_WORK = 1 << 18
"""Characters that may be looked at again: in half calls within half calls each opening would have all that follows
looked at, and nothing else runs meanwhile."""
_OPENING_WORK = 512
"""As how many characters an opening counts that opens nothing."""
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')


class ToolParser:
    """Base of the formats. Says where calls may begin; `read` says what follows."""

    markers: ClassVar[tuple[str, ...]] = ()
    """Open a call wherever they are."""
    first_markers: ClassVar[tuple[str, ...]] = ()
    """Open a call where the answer begins, and after a call."""
    bare: ClassVar[str] = ""
    """Characters that begin a call there without a marker, and belong to it."""
    separator: ClassVar[str] = ""
    """May stand between two calls."""

    def __init__(self, names: Iterable[str]) -> None:
        """`names`: of the tools that were offered."""
        self._names = frozenset(names)
        self._buffer = ""
        self._opening: str | None = None
        """While inside: what has opened it."""
        self._space = ""
        """White space that belongs to a call if one follows."""
        self._first = True
        """Nothing but calls has come so far, or since the last call."""
        self._after_call = False
        self._scan = _Scan()
        self._work = _MOST_WORK
        """Characters that may still be looked at; what is left where it runs out is text."""

    def feed(self, text: str) -> list[str | ToolCall]:
        """Text and calls that are certain after more text, in order."""
        self._buffer += text
        self._work += 4 * len(text)
        return self._run(last=False)

    def finish(self) -> list[str | ToolCall]:
        """No text follows."""
        return self._run(last=True)

    def read(self, text: str, last: bool) -> Read | None:
        """Calls that `text`, which follows an opening, begins with; None: more is needed to say. With `last`, None says
        that there is none."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------------------------------- for formats

    def value_end(self, text: str, start: int) -> int | None:
        """Where the JSON object or list ends that begins at `start`; None: not yet. Asked again, goes on from there."""
        before = self._scan.at
        end = self._scan.end(text, start)
        self.looked_at(self._scan.at - max(before, start))
        return end

    def looked_at(self, size: int) -> None:
        """So many characters were."""
        self._work -= size

    def calls_in(self, source: str) -> tuple[ToolCall, ...]:
        """The calls that a JSON object or list of objects stands for; none unless all are calls."""
        self.looked_at(len(source))
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
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments, strict=False)
            except (ValueError, RecursionError):
                return None
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))

    # ----------------------------------------------------------------------------------------------------- internals

    def _run(self, *, last: bool) -> list[str | ToolCall]:
        parts: list[str | ToolCall] = []
        while self._work > 0 and (
            self._inside(parts, last) if self._opening is not None else self._outside(parts, last)
        ):
            pass
        if self._work <= 0:
            rest, self._opening, self._buffer = (self._opening or "") + self._buffer, None, ""
            self._text(parts, rest)
        if last:
            if not self._after_call and self._space:
                parts.append(self._space)
            self._space = ""
        return parts

    def _inside(self, parts: list[str | ToolCall], last: bool) -> bool:
        found = self.read(self._buffer, last)
        if found is None and not last:
            return False
        opening, self._opening = self._opening, None
        self._scan = _Scan()
        if found is None or not found.calls:
            assert opening is not None
            self._first = False
            self._work -= _OPENING_WORK
            self._text(parts, opening)
            return True
        parts += found.calls
        self._buffer = self._buffer[found.end :]
        self._space, self._first, self._after_call = "", True, True
        return True

    def _outside(self, parts: list[str | ToolCall], last: bool) -> bool:
        buffer = self._buffer
        if self._first:
            size = self._first_opening(buffer)
            if size is None and not last:
                return False
            if size is not None and size >= 0:
                self._enter(buffer[:size], buffer[size:])
                return True
            self._first = not buffer.strip()
        places = [(place, -len(m), m) for m in self.markers if (place := buffer.find(m)) >= 0]
        if places:
            place, _, marker = min(places)
            self._text(parts, buffer[:place])
            self._enter(marker, buffer[place + len(marker) :])
            return True
        keep = 0 if last else max((overlap(buffer, m) for m in self.markers), default=0)
        self._text(parts, buffer[: len(buffer) - keep])
        self._buffer = buffer[len(buffer) - keep :]
        return False

    def _enter(self, opening: str, rest: str) -> None:
        self._opening, self._buffer = opening, rest

    def _first_opening(self, text: str) -> int | None:
        """Size of what opens a call at the beginning of `text`; -1: nothing does; None: more is needed to say."""
        start = text.lstrip()
        if self._after_call and self.separator and start.startswith(self.separator):
            start = start[len(self.separator) :].lstrip()
        before = len(text) - len(start)
        if not start:
            return None
        for marker in self.first_markers:
            if start.startswith(marker):
                return before + len(marker)
        if start[0] in self.bare:
            return before
        return None if any(m.startswith(start) for m in (*self.first_markers, *self.markers)) else -1

    def _text(self, parts: list[str | ToolCall], text: str) -> None:
        text = self._space + text
        if self._after_call:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._after_call = False
            parts.append(shown)


class _Scan:
    """Finds the end of a JSON object or list, going over each character once."""

    def __init__(self) -> None:
        self.at = -1
        """How far it has come; -1: nowhere yet."""
        self._end: int | None = None
        self._depth = 0
        self._in_string = False

    def end(self, text: str, start: int) -> int | None:
        """The index after it; None: not yet there."""
        if self._end is not None:
            return self._end
        at = max(self.at, start)
        while (found := (_IN_STRING if self._in_string else _OUTSIDE).search(text, at)) is not None:
            char, place = found[0], found.start()
            at = place + 1
            if char == "\\":
                if at == len(text):  # what it escapes is not there yet
                    self.at = place
                    return None
                at += 1
            elif char == '"':
                self._in_string = not self._in_string
            elif char in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    self.at = self._end = at
                    return at
        self.at = max(at, len(text))
        return None


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`, and is not all of it."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


def skip_space(text: str, start: int) -> int:
    """Where white space that begins at `start` ends."""
    return len(text) - len(text[start:].lstrip())
