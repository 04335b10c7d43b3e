"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, text around them."""

from __future__ import annotations

from .base import REJECTED, Read, ToolParser, skip_space
from .json_end import NEVER

_CLOSE = "</tool_call>"


class Hermes(ToolParser):
    """The closing tag may be missing: some models end their turn instead."""

    markers = ("<tool_call>",)

    def read(self, text: str, start: int, last: bool) -> Read | None:
        """Of the base."""
        begin = skip_space(text, start)
        if begin == len(text):
            return None
        end = self.value_end(text, begin) if text[begin] == "{" else NEVER
        if end is None or end == NEVER:
            return None if end is None else REJECTED
        after = skip_space(text, end)
        rest = text[after : after + len(_CLOSE)]
        if not last and rest != _CLOSE and _CLOSE.startswith(rest):
            return None
        return Read(after + len(_CLOSE) if rest == _CLOSE else end, self.calls_in(text[begin:end]))
