"""Any model: an answer that is `{"name": ..., "arguments": {...}}` or a list of them, in a code fence or not."""

from __future__ import annotations

from .base import REJECTED, Read, ToolParser, skip_space
from .json_end import NEVER

_FENCE = "```"


class PlainJson(ToolParser):
    """An object at the beginning is a call if it names a tool that was offered."""

    first_markers = ("```json", "```\n")
    bare = "{["

    def read(self, text: str, start: int, last: bool) -> Read | None:
        """Of the base."""
        begin = skip_space(text, start)
        if begin == len(text):
            return None
        end = self.value_end(text, begin) if text[begin] in "{[" else NEVER
        if end is None or end == NEVER:
            return None if end is None else REJECTED
        after = skip_space(text, end)
        rest = text[after : after + len(_FENCE)]
        if not last and rest != _FENCE and _FENCE.startswith(rest):
            return None
        return Read(after + len(_FENCE) if rest == _FENCE else end, self.calls_in(text[begin:end]))
