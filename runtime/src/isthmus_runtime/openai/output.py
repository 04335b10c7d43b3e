"""What a model writes, taken apart: its reasoning, its calls of tools, and the rest, which is the answer. Pure.

`Reader` takes text as it comes and gives what is certain; how the text is cut into pieces makes no difference. Nothing
is lost: text that is no call after all is content. White space beside a call or a reasoning belongs to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .tool_formats.base import ToolCall, ToolParser, collect, overlap


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

    @property
    def held(self) -> int:
        """Characters of the text so far of which nothing is certain yet."""
        tools = self._tools.held if self._tools is not None else 0
        return tools + (self._thinking.held if self._thinking is not None else 0)

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
        self._state: Callable[[str, bool], tuple[str, str]] = self._reasoning if opened else self._before
        self._space: list[str] = []
        """White space that is shown if text follows: in the pieces it came in, of which there may be many."""
        self._tail = ""
        """What may be the beginning of a tag."""
        self._begun = False
        """A part of the present side was given: white space before it is dropped."""

    @property
    def held(self) -> int:
        """Characters of white space that are not told yet."""
        return sum(map(len, self._space))

    def feed(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that are certain after more text."""
        return self._state(text, False)

    def finish(self) -> tuple[str, str]:
        """No text follows."""
        return self._state("", True)

    def _before(self, text: str, last: bool) -> tuple[str, str]:
        text, self._tail = self._tail + text, ""
        start = text.lstrip()
        collect(self._space, text[: len(text) - len(start)])
        if start.startswith(self.OPEN):
            self._space = []
            self._state = self._reasoning
            return self._reasoning(start[len(self.OPEN) :], last)
        if not last and self.OPEN.startswith(start):
            self._tail = start
            return "", ""
        self._state, self._begun = self._answer, True
        return self._answer("".join((*self._space, start)), last)

    def _reasoning(self, text: str, last: bool) -> tuple[str, str]:
        text, closed, rest = (self._tail + text).partition(self.CLOSE)
        sure = len(text) - (0 if closed or last else overlap(text, self.CLOSE))
        text, self._tail = text[:sure], text[sure:]
        if not self._begun:
            text = text.lstrip()
        shown = text.rstrip()
        if shown:
            self._begun = True
            text, shown = text[len(shown) :], "".join((*self._space, shown))
            self._space = []
        collect(self._space, text)
        if closed:
            self._state, self._begun, self._space = self._answer, False, []
            return shown, self._answer(rest, last)[1]
        return shown, ""

    def _answer(self, text: str, last: bool) -> tuple[str, str]:
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        return "", text
