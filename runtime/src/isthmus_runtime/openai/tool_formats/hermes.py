"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, text around them."""

from __future__ import annotations

from .base import Read, ToolParser


class Hermes(ToolParser):
    """The closing tag may be missing."""

    markers = ("<tool_call>",)

    def read(self, text: str, start: int, last: bool) -> Read | None:
        """See `ToolParser.read`."""
        return self.calls_at(text, start, last, "{", "</tool_call>")
