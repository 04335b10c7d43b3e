"""Text of messages is text: what a client writes never becomes a control token (ADR 27). Pure.

A tokenizer looks for its control tokens in the rendered prompt and cannot tell the template's from a user's. Most
conversations hold none, and are tokenised as they are. In the others each one is marked before the template is
rendered, so that those without a mark are the template's own; these are written by other, secret names, which a copy
of the tokenizer knows in place of the public ones. For that copy, the text of `<|im_end|>` is five words.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

from ..errors import InvalidRequest
from ..sharing.threads_in_turns import go_on
from ..structured.special_tokens import renamed

_BARS = re.compile(r"<[|｜].*[|｜]>")
_OWN = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})
"""What models write in their answers, which come back as text of the assistant's messages."""
_PART = 1 << 16
"""Characters searched at a time: a search does not let other threads run."""
_AT_ONCE = 1 << 20
"""Characters of a rendered conversation out of which marks are taken at a time: some milliseconds."""

MOST_CONTROL, _CHARACTERS_OF_ONE = 1 << 15, 64
"""Control tokens in the texts of a conversation: so many, and one more for as many characters. With their marks they
take several times as much as without, in each text that a template makes of them."""
_DIGITS = 12
"""Of a mark. Who guesses one has it taken out of a text, and no more."""

_Trie = dict[str, "_Trie"]


def control_strings(added: Iterable[Mapping[str, Any]], template: str) -> frozenset[str]:
    """Of the added tokens of a tokenizer.json, those that mean something to the model: special ones, those the chat
    template writes, and those that look like `<|this|>`. The others (runs of spaces, HTML tags) are text."""
    found = set()
    for token in added:
        text = token["content"]
        if text.strip() and (token.get("special") or text in template or _BARS.fullmatch(text)):
            found.add(text)
    return frozenset(found)


class Marks:
    """Put around the control strings of one conversation, for the time of its rendering: digits, which no filter of a
    template changes, drawn anew each time."""

    def __init__(self, characters: int = 0) -> None:
        """Of texts with so many characters together."""
        self.begin, self.end, self.cut = (f"{secrets.randbelow(10**_DIGITS):0{_DIGITS}}" for _ in range(3))
        """`cut`: where a text that is to be continued ends."""
        self._most = self._left = MOST_CONTROL + characters // _CHARACTERS_OF_ONE

    def around(self, token: str) -> str:
        """A control token, marked. InvalidRequest where there are too many."""
        self._left -= 1
        if self._left < 0:
            raise InvalidRequest(
                f"messages: their texts hold more than {self._most} control tokens of this model, such as {token!r}; "
                "take them out, or ask with allow_control_tokens",
                param="messages",
            )
        return f"{self.begin}{token}{self.end}"

    def without(self, text: str) -> str:
        """`text` without `begin` and `end`, a part at a time: while one is taken out no other thread runs, and of 14 MB
        of control tokens that is 0.4 s."""
        for mark in (self.begin, self.end):
            parts, start = [], 0
            while start < len(text):
                stop = start + _AT_ONCE
                across = text.find(mark, max(start, stop - len(mark) + 1), stop + len(mark) - 1)
                stop = stop if across < 0 else across + len(mark)
                parts.append(text[start:stop].replace(mark, ""))
                start = stop
                go_on()
            text = "".join(parts)
        return text


class ControlTokens:
    """The control tokens of one tokenizer. Safe to use from several threads."""

    def __init__(
        self,
        serialised: Callable[[], str],
        added: Sequence[Mapping[str, Any]],
        template: str,
        normalise: Callable[[str], str] | None = None,
    ) -> None:
        """`serialised`: the tokenizer.json, asked for by `prepare`, or when the first conversation needs it.
        `normalise`: the tokenizer's normalizer, where there is one."""
        self.strings = control_strings(added, template)
        # Such a token is looked for in the normalised text, in which more may look like it.
        late = any(token.get("normalized") and token["content"] in self.strings for token in added)
        self._normalise = normalise if late else None
        self._serialised = serialised
        self._longest = max(map(len, self.strings), default=0)
        self._find = re.compile(_either(self.strings)) if self.strings else None
        self._beginnings = frozenset(text[:n] for text in self.strings for n in range(1, len(text)))
        salt = secrets.token_hex(16)
        self._names = {text: f"{salt}{i:08x}" for i, text in enumerate(sorted(self.strings))}
        self._lock = threading.Lock()
        self._copy: HfTokenizer | None = None

    def prepare(self) -> None:
        """Make now what the first text with a control token in it needs. It takes a second or more, in which hardly any
        other thread runs."""
        if self.strings:
            self.copy()

    def found_in(self, value: Any, *, own: bool = False) -> bool:
        """Whether a text of `value` (nested lists and objects) may hold a control token, or ends with the beginning of
        one that what follows might complete. `own`: not those that models write themselves."""
        if isinstance(value, str):
            return self._found(value, own)
        if isinstance(value, Mapping):
            return any(self.found_in(k, own=own) or self.found_in(v, own=own) for k, v in value.items())
        return isinstance(value, (list, tuple)) and any(self.found_in(v, own=own) for v in value)

    def characters(self, value: Any) -> int:
        """Of all texts in `value`."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, Mapping):
            return sum(self.characters(k) + self.characters(v) for k, v in value.items())
        return sum(map(self.characters, value)) if isinstance(value, (list, tuple)) else 0

    def marked(self, value: Any, marks: Marks, *, own: bool = False) -> Any:
        """`value` with a mark before and after each control token in it."""
        if isinstance(value, str):
            return self._marked(value, marks, own)
        if isinstance(value, Mapping):
            return {
                self.marked(k, marks, own=own) if isinstance(k, str) else k: self.marked(v, marks, own=own)
                for k, v in value.items()
            }
        return [self.marked(v, marks, own=own) for v in value] if isinstance(value, (list, tuple)) else value

    def named(self, rendered: str, marks: Marks) -> str:
        """A rendered prompt with marks, in which control tokens without marks are the template's, as `copy` is to
        tokenise it."""
        assert self._find is not None
        names = self._names

        def written(match: re.Match[str]) -> str:
            text = match[0]
            return names.get(text) or text.replace(marks.begin, "").replace(marks.end, "")

        both = re.compile(
            f"{marks.begin}(?:{self._find.pattern}){marks.end}|{marks.begin}|{marks.end}|{self._find.pattern}"
        )
        across = self._longest + len(marks.begin) + len(marks.end)
        return _replaced(both, written, rendered, across)

    def copy(self) -> HfTokenizer:
        """The tokenizer that knows control tokens by their secret names, and nothing else of them."""
        with self._lock:
            if self._copy is None:
                self._copy = HfTokenizer.from_str(json.dumps(renamed(json.loads(self._serialised()), self._names)))
            return self._copy

    def _found(self, text: str, own: bool) -> bool:
        return (
            self._holds(text, own)
            or self._open_end(text) > 0
            # To normalise takes hundreds of bytes for a character, and lets no other thread run. For a long text it is
            # not done: where nothing is marked, the tokens are the same.
            or (self._normalise is not None and (len(text) > _PART or self._holds(self._normalise(text), own)))
        )

    def _holds(self, text: str, own: bool) -> bool:
        if self._find is None:
            return False
        for start in range(0, len(text), _PART):
            end = start + _PART + self._longest
            if any(not (own and m[0] in _OWN) for m in self._find.finditer(text, start, end)):
                return True
        return False

    def _open_end(self, text: str) -> int:
        """How far the beginning of a control token reaches back from where `text` ends, white space aside; 0: none."""
        tail = text[-self._longest - 256 :].rstrip()[-self._longest :]
        return next((n for n in range(min(len(tail), self._longest - 1), 0, -1) if tail[-n:] in self._beginnings), 0)

    def _marked(self, text: str, marks: Marks, own: bool) -> str:
        if self._find is None:
            return text
        if self._open_end(text):
            bare = text.rstrip()
            text = bare + marks.end + text[len(bare) :]

        def marked(match: re.Match[str]) -> str:
            return match[0] if own and match[0] in _OWN else marks.around(match[0])

        return _replaced(self._find, marked, text, self._longest)


def _replaced(find: re.Pattern[str], replace: Callable[[re.Match[str]], str], text: str, longest: int) -> str:
    """As `find.sub(replace, text)`, where what is found has 1 to `longest` characters and looks at no others, a part at
    a time: of 14 MB of `<`, with each of which a control token may begin, one search takes a quarter of a second."""
    parts, start = list[str](), 0
    while start < len(text):
        stop, pieces = min(start + _PART, len(text)), list[str]()
        for match in find.finditer(text, start, stop + longest):
            if match.start() >= stop:
                break
            pieces += (text[start : match.start()], replace(match))
            start = match.end()
        parts.append("".join((*pieces, text[start:stop])))  # those of all of the text would take as long again
        start = max(stop, start)
        go_on()
    return "".join(parts)


def _either(strings: Iterable[str]) -> str:
    """An expression for the longest of `strings` at a place, as a tree: there may be thousands."""
    root: _Trie = {}
    for text in strings:
        node = root
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _branches(root)


def _branches(node: _Trie) -> str:
    alone = []
    while len(node) == 1 and "" not in node:  # not by calling itself: a file's token may be longer than the stack
        (char, node), *_ = node.items()
        alone.append(re.escape(char))
    if alone:
        return "".join(alone) + _branches(node)
    parts = [re.escape(char) + _branches(below) for char, below in sorted(node.items()) if char]
    if not parts:
        return ""
    body = parts[0] if len(parts) == 1 and "" not in node else f"(?:{'|'.join(parts)})"
    return body + "?" if "" in node else body
