"""The lines of an engine's answer, as its bytes arrive. Pure."""

from __future__ import annotations

import re
from collections import deque

from ..request import FinishReason, TokenChunk

_PLAIN = b'{"t":['
"""Most lines are this, one token id and `]}`: they need no JSON parser."""
_LAST = re.compile(rb'\{"t":\[(\d*)\],"f":"(\w+)"\}')
"""The last line of most answers."""
_GOOD_ENDS = {reason.value.encode(): reason for reason in (FinishReason.STOP, FinishReason.LENGTH)}


class TokenLines:
    """Those that are whole and were not taken; true where there are any."""

    __slots__ = ("_lines", "_rest")

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque()
        self._rest = b""

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, data: bytes) -> None:
        """More bytes of the answer."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._lines.extend(lines)

    def plain_of(self, data: bytes) -> TokenChunk | None:
        """`add` it, and then `plain`."""
        if not self._rest and not self._lines and data.startswith(_PLAIN) and data.endswith(b"]}\n"):
            number = data[len(_PLAIN) : -3]
            if number.isdigit():
                return TokenChunk((int(number),))
        self.add(data)
        return self.plain()

    def pop(self) -> bytes:
        """The next line, which must be there."""
        return self._lines.popleft()

    def plain(self, before: TokenChunk | None = None) -> TokenChunk | None:
        """The plain lines that come next, up to the last of the answer: one chunk downstream instead of several.
        `before`: a chunk that they go on from. Without one, None where the next line is no plain one."""
        lines = self._lines
        found: list[int] = []
        reason = None
        taken = False
        while lines and reason is None and (raw := lines[0]).startswith(_PLAIN):
            number = raw[len(_PLAIN) : -2]
            if not number.isdigit() or not raw.endswith(b"]}"):
                last = _LAST.fullmatch(raw)
                if last is None or (reason := _GOOD_ENDS.get(last[2])) is None:
                    break
                number = last[1]
            if number:
                found.append(int(number))
            taken = True
            lines.popleft()
        if before is None:
            return TokenChunk(tuple(found), (), reason) if taken else None
        return before._replace(token_ids=(*before.token_ids, *found), finish_reason=reason) if taken else before
