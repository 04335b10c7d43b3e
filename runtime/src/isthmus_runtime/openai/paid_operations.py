"""Operations of chat templates on values, each paid for from the budget of a rendering.

One operation on a value may go through all that is in it, and a value may hold another twice, which holds a third
twice: sixty sets make what takes 2^60 steps to hash, compare or write. So whatever may be gone through is paid for by
all that it holds, before. What makes text or lists is paid for before it is made where its size does not follow from
what went in, else after.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, Sized, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import Environment, nodes
from jinja2.runtime import Context
from jinja2.utils import Namespace

_OF_TEXT = frozenset(
    ("capitalize", "e", "escape", "format", "indent", "lower", "safe", "title", "trim", "upper", "wordcount")
)
"""Filters that write what is no text as text."""
_OF_NOTHING = frozenset(("count", "d", "default", "first", "last", "length"))
"""Filters that do not go through what they are given, whose length is known: templates ask for that of all messages in
a loop over them."""
_PRODUCT = frozenset(("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim"))
"""What may compare each character with each of its argument's, as it searches from the end or for any of a set."""
_EACH = frozenset(("list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr", "sort", "unique"))
"""Filters that go through a text a character at a time."""
_LOWERED = frozenset(("dictsort", "max", "min", "sort", "unique"))
"""Filters that compare texts by copies in lower case."""
_SCAN = 4096
"""Characters that one step looks at, where a function of the interpreter does."""
_SLOW_SCAN = 4
"""The same where Python or a regular expression does, for each of them or each word."""
ELEMENT, _NEW_ELEMENT = 8, 64
"""Bytes that an element of a list takes, and one that is made with it."""
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_MOST_NESTED = 256
"""Of values: what goes through them in C takes its stack for each level."""
_MOST_INDENT = 64
_WIDE = re.compile(r"\d{3}|\*|\{[^}]*\{")
"""In a format: a width of three digits, or one that is an argument."""


class TemplateTooCostly(Exception):
    """The budget is used up; the message says how."""


class Budget:
    """What one rendering may still use."""

    __slots__ = ("depth", "left", "most", "steps")

    def __init__(self, steps: int, left: int, most: int | None = None) -> None:
        self.steps = steps
        """Operations; each looks at no more than 4096 characters."""
        self.left = left
        """Bytes of texts and lists that may be made."""
        self.most = left if most is None else most
        """Of one text or list. What was made before it is mostly gone by then."""
        self.depth = 0
        """Calls within calls."""

    def step(self, count: int = 1) -> None:
        """Pay for work. Raises TemplateTooCostly."""
        self.steps -= count
        if self.steps < 0:
            raise TemplateTooCostly("it takes too many steps")

    def make(self, size: int) -> None:
        """Pay for a text or a list of `size` bytes. Raises TemplateTooCostly."""
        self.left -= size
        if self.left < 0 or size > self.most:
            raise TemplateTooCostly("it makes too much text")

    def look(self, value: object, depth: int = 0) -> int:
        """Pay for going through `value`, nested as it may be: one object met twice is paid for twice. Returns how many
        bytes its texts take together. Raises TemplateTooCostly."""
        if isinstance(value, str):
            self.step(1 + len(value) // _SCAN)
            return size_of(value)
        if isinstance(value, Namespace):
            value = object.__getattribute__(value, "_Namespace__attrs")
        if isinstance(value, Mapping):
            value = value.items()
        if not isinstance(value, _NESTING):
            self.step(1 + (len(value) if isinstance(value, Sized) else 0))
            return 0
        if depth >= _MOST_NESTED:
            raise TemplateTooCostly(f"it nests values more than {_MOST_NESTED} levels deep")
        self.step()
        return sum(self.look(item, depth + 1) for item in value)


_NESTING = (list, tuple, KeysView, ValuesView, ItemsView)
BUDGET: ContextVar[Budget] = ContextVar("_BUDGET")


def size_of(*texts: str) -> int:
    """Bytes that they take as one text: a wide character makes all others as wide."""
    return sum(map(len, texts)) * max(map(_width, texts), default=1)


def _width(text: str) -> int:
    return 1 if text.isascii() else min(4, sys.getsizeof(text) // (len(text) + 1))


def made(value: Any) -> Any:
    """`value`, paid for."""
    if isinstance(value, str):
        BUDGET.get().make(size_of(value))
    elif isinstance(value, (list, tuple, dict)):
        BUDGET.get().make(ELEMENT * len(value))
    return value


def cut(text: str, pieces: int) -> None:
    """Pay for a list of parts of a text, before it is made."""
    budget = BUDGET.get()
    budget.step(pieces // _SLOW_SCAN)
    budget.make(size_of(text) + _NEW_ELEMENT * pieces)


def _words(text: str) -> int:
    """How many words a text has at most."""
    return (len(text) + 1) // 2


def parts(text: str, args: Sequence[object], kwargs: Mapping[str, object]) -> int:
    """How many parts `split` and `rsplit` cut a text into, at most."""
    sep = args[0] if args else kwargs.get("sep")
    maxsplit = args[1] if len(args) > 1 else kwargs.get("maxsplit")
    found = 1 + (text.count(sep) if isinstance(sep, str) and sep else _words(text))
    return min(found, maxsplit + 1) if isinstance(maxsplit, int) and maxsplit >= 0 else found


def lines(text: str) -> int:
    """How many lines a text has at most."""
    return 1 + sum(map(text.count, _LINE_ENDS))


def counted(values: Iterable[Any]) -> Iterator[Any]:
    """The values, a step each."""
    budget = BUDGET.get()
    for value in values:
        budget.step()
        yield value


def loop(values: Any) -> Any:
    """What a loop goes over; its length stays known where it is."""
    if isinstance(values, (list, tuple, range, dict)):
        BUDGET.get().step(len(values))
        return values
    return counted(values)


def looked(value: Any) -> Any:
    """An operand of a comparison."""
    BUDGET.get().look(value)
    return value


def asked(value: Any) -> Any:
    """What another value is looked for in: a mapping finds it without going through its own."""
    if type(value) is dict:
        BUDGET.get().step()
        return value
    return looked(value)


def as_text(value: Any) -> str:
    """`value` as text, paid for by all that is written of it. Raises TemplateTooCostly."""
    if isinstance(value, str):
        return value
    budget = BUDGET.get()
    budget.make(budget.look(value))
    text = str(value)
    budget.make(size_of(text))
    return text


def concatenate(values: Iterable[Any]) -> str:
    """The operator `~`."""
    parts = [as_text(v) for v in values]
    BUDGET.get().make(size_of(*parts))
    return "".join(parts)


def replace(text: str, old: str, new: str, count: int = -1) -> str:
    """The method of texts."""
    budget = BUDGET.get()
    budget.look(text)
    found = text.count(old) if count is None or count < 0 else min(count, text.count(old))
    budget.make((len(text) + found * len(new)) * max(_width(text), _width(new)))
    return text.replace(old, new, found)


def join(values: Iterable[Any], separator: str = "") -> str:
    """The filter, and with its arguments changed round the method."""
    parts = [as_text(v) for v in counted(values)]
    BUDGET.get().make(size_of(*parts) + size_of(separator, *parts[:1]) * len(parts))
    return separator.join(parts)


def checked_format(text: object, given: object) -> None:
    """Pay for `given`, which each field of a format may write whole."""
    budget = BUDGET.get()
    size = budget.look(given)
    if isinstance(text, str):
        if _WIDE.search(text):
            raise TemplateTooCostly("it uses a format of unbounded width")
        budget.make(size * (text.count("%") + text.count("{")))


def searched(name: str, text: object, given: Iterable[object]) -> None:
    """Pay for what `_PRODUCT` tells of, about a nanosecond for each pair of characters."""
    if name in _PRODUCT and isinstance(text, str):
        BUDGET.get().step(len(text) * max((len(g) for g in given if isinstance(g, str)), default=0) // 1000)


def _checked_width(width: object) -> None:
    if (len(width) if isinstance(width, str) else width if isinstance(width, int) else 0) > _MOST_INDENT:
        raise TemplateTooCostly(f"it indents or separates by more than {_MOST_INDENT} characters")


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter. Jinja2's own escapes HTML, which no model was trained on."""
    budget = BUDGET.get()
    budget.look(value)
    for width in (indent, *(separators or ())):
        _checked_width(width)
    size = _Written(indent, separators, ensure_ascii=ensure_ascii)
    characters = size.of(value)
    budget.make(characters * size.width + (0 if indent is None else _NEW_ELEMENT * size.elements))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Written:
    """How long a value is as JSON, at the most: indented, each value within many others has a long line."""

    def __init__(self, indent: int | str | None, separators: tuple[str, str] | None, *, ensure_ascii: bool) -> None:
        self.elements = 0
        """Of lists and objects, so far."""
        self.width = 1
        """Bytes of a character."""
        self._indent = -1 if indent is None else len(indent) if isinstance(indent, str) else max(indent, 0)
        self._between, self._after_key = map(len, separators or (", ", ": "))
        self._text = json.JSONEncoder(ensure_ascii=ensure_ascii).encode

    def of(self, value: Any, depth: int = 1) -> int:
        """Characters of a value that has been looked at."""
        if isinstance(value, str):
            written = self._text(value)
            self.width = max(self.width, _width(written))
            return len(written)
        if isinstance(value, int):
            return 5 + value.bit_length() // 3
        if not isinstance(value, (Mapping, list, tuple)):
            return 32  # null, and numbers with a point; others are refused when they are written
        self.elements += len(value)
        line = self._between + (0 if self._indent < 0 else 1 + self._indent * depth)
        found = 2 + line * (len(value) + 1)
        if isinstance(value, Mapping):
            found += self._after_key * len(value) + sum(2 + self.of(key, depth) for key in value)
            value = value.values()
        return found + sum(self.of(one, depth + 1) for one in value)


_PASSED = (Context, Environment, nodes.EvalContext)
"""What jinja2 gives some filters before the value."""


def _through(name: str, text: str) -> None:
    """Pay for a filter that goes through a text by Python or by regular expressions."""
    if name in _EACH:
        cut(text, len(text))
    elif name in ("title", "wordcount"):
        cut(text, _words(text))
    elif name == "indent":
        cut(text, lines(text))
    elif name in ("e", "escape"):
        BUDGET.get().make((len(text) + 5 * sum(map(text.count, "&<>'\""))) * _width(text))


def paying(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of jinja2 that pays for its arguments and for its result."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if name in _OF_TEXT and args:
            args = (as_text(args[0]), *args[1:])
        given = (*args, *kwargs.values())
        budget = BUDGET.get()
        for value in given:
            if name not in _OF_NOTHING or not isinstance(value, Sized):
                size = budget.look(value)
                if name in _LOWERED:
                    budget.make(size)
        budget.step()
        value = next((one for one in args if not isinstance(one, _PASSED)), None)
        if isinstance(value, str):
            _through(name, value)
        if name == "format":
            checked_format(args[0], given[1:])
        elif name == "indent":
            for width in given[1:]:
                _checked_width(width)
        searched(name, args[0] if args else None, given[1:])
        result = function(*args, **kwargs)
        return counted(result) if isinstance(result, Iterator) else made(result)

    return call


def paying_test(function: Callable[..., Any]) -> Callable[..., Any]:
    """A test of jinja2 that pays for going through its arguments."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        budget = BUDGET.get()
        for value in args:
            budget.make(budget.look(value))
        return function(*args)

    return call


def filter_replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    """The filter."""
    return replace(as_text(text), as_text(old), as_text(new), -1 if count is None else count)


@contextmanager
def paying_from(budget: Budget) -> Iterator[None]:
    """What templates do meanwhile in this thread or task is paid from `budget`."""
    token = BUDGET.set(budget)
    try:
        yield
    finally:
        BUDGET.reset(token)
