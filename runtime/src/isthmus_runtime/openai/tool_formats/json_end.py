"""Where a JSON object or list ends, in text that comes in pieces. Pure.

Whoever chooses the text may open a call every few characters, and each opening that comes to nothing is followed by a
search for the next one, in the same text. So a value is given up at the first character outside of strings that no JSON
has there; every marker holds one. With that, no character is gone over more than twice, whatever the text: of two
openings whose values both go on, one is outside of a string where the other is inside, from the second one's beginning
on (a backslash, which would change that, ends the one outside). A third marker is outside of a string for one of them,
and ends it. Values that have an end are read, which goes over them once more.
"""

from __future__ import annotations

import re

MAX_SIZE = 1 << 19
"""Characters of a value: more are held back for no call."""
MAX_DEPTH = 200
"""Levels of lists and objects; a request that tells of the call may have as many."""

NEVER = -1

_OUTSIDE = re.compile(r'(?:[-+.0-9eEtruefalsn:, \t\r\n]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+', re.DOTALL)
"""What is between brackets: strings that are whole, and what JSON has beside them."""
_INSIDE = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
"""Up to the end of a string."""


class JsonEnd:
    """Finds the end of one value; asked again with more text, it goes on from where it was."""

    __slots__ = ("_depth", "_end", "_in_string", "looked")

    def __init__(self) -> None:
        self.looked = 0
        """Characters of the value that were gone over."""
        self._end: int | None = None
        self._depth = 0
        self._in_string = False

    def find(self, text: str, start: int) -> int | None:
        """The index after the value that begins at `start`; None: not yet there; NEVER: it is no JSON, or too large."""
        if self._end is None:
            self._end = self._look(text, start)
        return self._end if self._end is None or self._end < 0 else start + self._end

    def _look(self, text: str, start: int) -> int | None:
        at, size = start + self.looked, min(len(text), start + MAX_SIZE)
        end = NEVER if len(text) - start > MAX_SIZE else None
        while at < size:
            if self._in_string:
                at = _INSIDE.match(text, at, size).end()  # type: ignore[union-attr]  # it may match nothing
                if at == size or text[at] == "\\":  # of which the next character is missing
                    break
                at += 1
                self._in_string = False
            at = _OUTSIDE.match(text, at, size).end()  # type: ignore[union-attr]
            if at == size:
                break
            char = text[at]
            at += 1
            if char == '"':
                self._in_string = True
            elif char in "{[" and self._depth < MAX_DEPTH:
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    end = at - start
                    break
            else:
                end = NEVER
                break
        self.looked = at - start
        return end
