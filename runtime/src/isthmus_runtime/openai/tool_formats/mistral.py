"""Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, and the later `[TOOL_CALLS]name[ARGS]{...}`."""

from __future__ import annotations

import json
import re

from .base import REJECTED, Read, ToolParser, skip_space

# Possessive: white space is shared out in one way alone.
_NAMED = re.compile(r"\s*+([^\s\[\]{}\"]{1,256}+)\s*+(?:\[CALL_ID\][^\s\[\]{}\"]{1,64}+)?\s*+(?:\[ARGS\])?\s*+")
_LONGEST_HEAD = 512


class Mistral(ToolParser):
    """Both ways; several calls are in one list, or have a marker each."""

    markers = ("[TOOL_CALLS]",)

    def read(self, text: str, last: bool) -> Read | None:
        """Of the base."""
        start = skip_space(text, 0)
        if start == len(text):
            return None
        if text[start] in "[{":
            end = self.value_end(text, start)
            return None if end is None else Read(end, self.calls_in(text[start:end]))
        brace = text.find("{", start, start + _LONGEST_HEAD)
        if brace < 0:
            return None if len(text) - start < _LONGEST_HEAD else REJECTED
        head = _NAMED.fullmatch(text, 0, brace)
        if head is None:
            return REJECTED
        end = self.value_end(text, brace)
        if end is None:
            return None
        self.looked_at(end - brace)
        try:
            arguments = json.loads(text[brace:end], strict=False)
        except (ValueError, RecursionError):
            return REJECTED
        call = self.call(head[1], arguments)
        return REJECTED if call is None else Read(end, (call,))
