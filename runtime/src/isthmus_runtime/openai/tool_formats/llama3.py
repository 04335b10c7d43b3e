"""Llama 3: an answer that is `{"name": ..., "parameters": {...}}`, several separated by `;`, after `<|python_tag|>` or
not."""

from __future__ import annotations

from .base import REJECTED, Read, ToolParser, skip_space


class Llama3(ToolParser):
    """An object at the beginning is a call if it names a tool that was offered."""

    markers = ("<|python_tag|>",)
    bare = "{"
    separator = ";"

    def read(self, text: str, last: bool) -> Read | None:
        """Of the base."""
        start = skip_space(text, 0)
        if start == len(text):
            return None
        if text[start] != "{":
            return REJECTED
        end = self.value_end(text, start)
        return None if end is None else Read(end, self.calls_in(text[start:end]))
