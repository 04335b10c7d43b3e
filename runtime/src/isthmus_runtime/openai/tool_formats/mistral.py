"""Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, and the later `[TOOL_CALLS]name[ARGS]{...}`."""

from __future__ import annotations

import re

from .base import REJECTED, Read, ToolParser, skip_space
from .json_end import NEVER

_NAMED = re.compile(r"\s*+([^\s\[\]{}\"]{1,256}+)\s*+(?:\[CALL_ID\][^\s\[\]{}\"]{1,64}+\s*+)?+(?:\[ARGS\]\s*+)?+")
"""Nothing in it is tried in two ways: what may come next never begins like what came."""
_LONGEST_HEAD = 512


class Mistral(ToolParser):
    """Both ways; several calls are in one list, or have a marker each."""

    markers = ("[TOOL_CALLS]",)

    def read(self, text: str, start: int, last: bool) -> Read | None:
        """See `ToolParser.read`."""
        begin = skip_space(text, start)
        if begin == len(text):
            return None
        named = text[begin] not in "[{"
        if named:
            begin = text.find("{", start, start + _LONGEST_HEAD)
            if begin < 0:
                return None if len(text) - start < _LONGEST_HEAD else REJECTED
        head = _NAMED.fullmatch(text, start, begin) if named else None
        end = self.value_end(text, begin) if head is not None or not named else NEVER
        if end is None or end == NEVER:
            return None if end is None else REJECTED
        if head is None:
            return Read(end, self.calls_in(text[begin:end]))
        call = self.call(head[1], text[begin:end])
        return REJECTED if call is None else Read(end, (call,))
