"""What a model writes, taken apart: its reasoning, its calls of tools, and the rest, which is the answer. Pure.

`Reader` takes text as it comes and gives what is certain; how the text is cut into pieces makes no difference. Nothing
is lost: text that is no call after all is content. White space beside a call or a reasoning belongs to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .tool_formats.base import ToolCall, ToolParser, overlap


class Delta(NamedTuple):
    """New parts of one answer, in the order of the fields."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


class Reader:
    """Text of one generation to deltas."""

    def __init__(self, tools: ToolParser | None, thinking: Thinking | None) -> None:
        self._tools = tools
        self._thinking = thinking

    def feed(self, text: str) -> Delta:
        """What is certain after more text."""
        reasoning = ""
        if self._thinking is not None:
            reasoning, text = self._thinking.feed(text)
        return self._content(reasoning, text)

    def finish(self) -> Delta:
        """No text follows."""
        reasoning, text = self._thinking.finish() if self._thinking is not None else ("", "")
        first = self._content(reasoning, text)
        if self._tools is None:
            return first
        last = self._tools.finish()
        content = "".join(p for p in last if isinstance(p, str))
        calls = tuple(p for p in last if isinstance(p, ToolCall))
        return Delta(first.reasoning, first.content + content, first.calls + calls)

    def _content(self, reasoning: str, text: str) -> Delta:
        if self._tools is None:
            return Delta(reasoning, text)
        parts = self._tools.feed(text) if text else []
        content = "".join(p for p in parts if isinstance(p, str))
        return Delta(reasoning, content, tuple(p for p in parts if isinstance(p, ToolCall)))


class Thinking:
    """Splits `<think>reasoning</think>answer`. An answer that does not begin with the tag has no reasoning, unless the
    prompt has opened it already."""

    OPEN = "<think>"
    CLOSE = "</think>"

    def __init__(self, *, opened: bool) -> None:
        """`opened`: the prompt ends with the opening tag."""
        self._state: Callable[[bool], tuple[str, str]] = self._reasoning if opened else self._before
        self._held = ""
        self._begun = False
        """A part of the present side was given: white space before it is dropped."""

    def feed(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that are certain after more text."""
        self._held += text
        return self._state(False)

    def finish(self) -> tuple[str, str]:
        """No text follows."""
        return self._state(True)

    def _before(self, last: bool) -> tuple[str, str]:
        start = self._held.lstrip()
        if start.startswith(self.OPEN):
            self._held = start[len(self.OPEN) :]
            self._state = self._reasoning
            return self._reasoning(last)
        if not last and self.OPEN.startswith(start):
            return "", ""
        self._state, self._begun = self._answer, True
        return self._answer(last)

    def _reasoning(self, last: bool) -> tuple[str, str]:
        text, closed, rest = self._held.partition(self.CLOSE)
        if closed:
            self._held = rest
            self._state = self._answer
            reasoning = text.rstrip() if self._begun else text.strip()
            self._begun = False
            return reasoning, self._answer(last)[1]
        keep = 0 if last else overlap(self._held, self.CLOSE)
        sure = self._held[: len(self._held) - keep]
        if not self._begun:
            sure = sure.lstrip()
        shown = sure.rstrip()
        self._held = sure[len(shown) :] + (self._held[len(self._held) - keep :] if keep else "")
        self._begun = self._begun or bool(shown)
        return shown, ""

    def _answer(self, last: bool) -> tuple[str, str]:
        text = self._held if self._begun else self._held.lstrip()
        self._begun = self._begun or bool(text)
        self._held = ""
        return "", text
