"""Llama 3: an answer that is `{"name": ..., "parameters": {...}}`, several separated by `;`, after `<|python_tag|>` or
not."""

from __future__ import annotations

from .base import Read, ToolParser


class Llama3(ToolParser):
    """An object at the beginning is a call if it names a tool that was offered."""

    markers = ("<|python_tag|>",)
    bare = "{"
    separator = ";"

    def read(self, text: str, start: int, last: bool) -> Read | None:
        """See `ToolParser.read`."""
        return self.calls_at(text, start, last, "{")
