"""Long lists of numbers of a body, read in pieces: no other thread runs while a library reads one whole. Pure."""

from __future__ import annotations

from secrets import token_hex
from typing import Any

from pydantic_core import from_json

_LONG, _PIECE = 1 << 11, 1 << 16
"""Bytes of a list that is read by itself, and of it at a time: a millisecond."""
_NUMBERS = b"0123456789, \t\r\n"
"""Without sign, point and exponent: token ids."""


class LongLists:
    """The innermost lists of a body that are long and have nothing but digits and what stands between numbers.

    Where each is, is not known before the rest is read: brackets may be part of a text. So the rest has in the place of
    each a list with a text that no client can know, and where that is no JSON, or not all of them are found in it,
    something was not as it looked.
    """

    def __init__(self, body: bytes) -> None:
        """Finds them."""
        self._body = body
        self._mark = token_hex(16)
        self._places = list[tuple[int, int]]()
        rest, begin, end, taken = list[bytes](), body.find(b"["), -1, 0
        while begin >= 0:
            if end < begin:
                end = body.find(b"]", begin)
                if end < 0:
                    break
            following = body.find(b"[", begin + 1)
            if (following < 0 or following > end) and end - begin > _LONG and self._has_numbers(begin + 1, end):
                rest += body[taken:begin], b'["%b:%d"]' % (self._mark.encode(), len(self._places))
                self._places.append((begin + 1, end))
                taken = end + 1
            begin = following
        self.rest = b"".join((*rest, body[taken:])) if rest else body
        """The body without them."""

    def __len__(self) -> int:
        return len(self._places)

    def read(self) -> Any:
        """The value of the body. ValueError: something is not as it looks, or is no JSON."""
        value = from_json(self.rest, allow_inf_nan=False)
        marks = {f"{self._mark}:{number}": place for number, place in enumerate(self._places)}
        left: list[Any] = [value]
        while left:
            one = left.pop()
            for inner in one.values() if type(one) is dict else one:
                if type(inner) is list:
                    first = inner[0] if len(inner) == 1 else None
                    if type(first) is str and (place := marks.pop(first, None)) is not None:
                        inner[:] = self._read(*place)
                    else:
                        left.append(inner)
                elif type(inner) is dict:
                    left.append(inner)
        if marks:
            raise ValueError("a list was part of a text, or of an object that another one of its name replaces")
        return value

    def _has_numbers(self, begin: int, end: int) -> bool:
        body = self._body
        return not any(body[at : min(at + _PIECE, end)].translate(None, _NUMBERS) for at in range(begin, end, _PIECE))

    def _read(self, begin: int, end: int) -> list[int]:
        body, found = self._body, list[int]()
        while True:
            stop = body.find(b",", begin + _PIECE, end)
            piece = body[begin : end if stop < 0 else stop]
            if not piece.strip():
                raise ValueError("there is no number behind a comma")
            found += from_json(b"[%b]" % piece)
            if stop < 0:
                return found
            begin = stop + 1
