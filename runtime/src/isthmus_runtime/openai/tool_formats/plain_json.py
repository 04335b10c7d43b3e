"""Any model: an answer that is `{"name": ..., "arguments": {...}}` or a list of them, in a code fence or not."""

from __future__ import annotations

from .base import Read, ToolParser


class PlainJson(ToolParser):
    """An object at the beginning is a call if it names a tool that was offered."""

    first_markers = ("```json", "```\n")
    bare = "{["

    def read(self, text: str, start: int, last: bool) -> Read | None:
        """See `ToolParser.read`."""
        return self.calls_at(text, start, last, "{[", "```")
