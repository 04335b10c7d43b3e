"""Any model: an answer that is `{"name": ..., "arguments": {...}}` or a list of them, in a code fence or not."""

from __future__ import annotations

from .base import REJECTED, Read, ToolParser, skip_space

_FENCE = "```"


class PlainJson(ToolParser):
    """An object at the beginning is a call if it names a tool that was offered."""

    first_markers = ("```json", "```\n")
    bare = "{["

    def read(self, text: str, last: bool) -> Read | None:
        """Of the base."""
        start = skip_space(text, 0)
        if start == len(text):
            return None
        if text[start] not in "{[":
            return REJECTED
        end = self.value_end(text, start)
        if end is None:
            return None
        calls = self.calls_in(text[start:end])
        after = skip_space(text, end)
        rest = text[after : after + len(_FENCE)]
        if calls and not last and rest != _FENCE and _FENCE.startswith(rest):
            return None
        return Read(after + len(_FENCE) if rest == _FENCE else end, calls)
