"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, text around them."""

from __future__ import annotations

from .base import REJECTED, Read, ToolParser, skip_space

_CLOSE = "</tool_call>"


class Hermes(ToolParser):
    """The closing tag may be missing: some models end their turn instead."""

    markers = ("<tool_call>",)

    def read(self, text: str, last: bool) -> Read | None:
        """Of the base."""
        start = skip_space(text, 0)
        if start == len(text):
            return None
        if text[start] != "{":
            return REJECTED
        end = self.value_end(text, start)
        if end is None:
            return None
        after = skip_space(text, end)
        rest = text[after : after + len(_CLOSE)]
        if not last and rest != _CLOSE and _CLOSE.startswith(rest):
            return None
        return Read(after + len(_CLOSE) if rest == _CLOSE else end, self.calls_in(text[start:end]))
