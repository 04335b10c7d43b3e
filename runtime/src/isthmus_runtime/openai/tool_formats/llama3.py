"""Llama 3: an answer that is `{"name": ..., "parameters": {...}}`, several separated by `;`, after `<|python_tag|>` or
not."""

from __future__ import annotations

from .base import REJECTED, Read, ToolParser, skip_space
from .json_end import NEVER


class Llama3(ToolParser):
    """An object at the beginning is a call if it names a tool that was offered."""

    markers = ("<|python_tag|>",)
    bare = "{"
    separator = ";"

    def read(self, text: str, start: int, last: bool) -> Read | None:
        """Of the base."""
        begin = skip_space(text, start)
        if begin == len(text):
            return None
        end = self.value_end(text, begin) if text[begin] == "{" else NEVER
        if end is None or end == NEVER:
            return None if end is None else REJECTED
        return Read(end, self.calls_in(text[begin:end]))
