"""Jinja2 in its immutable sandbox, with every operation paid for: rendering ends within a number of steps and of made
characters, however a template loops, repeats or pads. Jinja2's own sandbox keeps a template from Python's insides, and
bounds nothing but `range`.

One operation on a value may go through all that is in it, and a value may hold another twice, which holds a third
twice: sixty sets make what takes 2^60 steps to hash, compare or write. So whatever may be gone through is paid for by
all that it holds, before.

A step is about a microsecond. Loops and comparisons are counted through the syntax tree, attribute access and calls
through the sandbox's hooks; what makes text or lists is paid for before it is made where its size does not follow from
what went in, else after. Filters and methods are allow-lists, so that nothing is free by oversight.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, Sized, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import Environment, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_FILTERS = """
    abs attr capitalize count default d dictsort e escape first float format indent int items last length list lower map
    max min reject rejectattr reverse safe select selectattr sort title trim unique upper wordcount
"""
_METHODS = {
    str: "capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit islower "
    "isnumeric isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex "
    "rpartition rsplit rstrip split splitlines startswith strip swapcase title upper",
    dict: "copy get items keys values",
    list: "copy count index",
    tuple: "count index",
    int: "",
    float: "",
    range: "",
    type({}.keys()): "",
    type({}.values()): "",
    type({}.items()): "",
}
_ALLOWED = {kind: frozenset(names.split()) for kind, names in _METHODS.items()}
_TESTS = "in == eq equalto != ne > gt greaterthan >= ge < lt lessthan <= le lower upper"
"""Those that may go through what they are given; all others look at its type or at a number."""
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
_ELEMENT, _NEW_ELEMENT = 8, 64
"""Characters as which an element of a list counts, by the bytes it takes, and one that is made with it."""
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_MOST_DEPTH = 64
_MOST_NESTED = 256
"""Of values: what goes through them in C takes its stack for each level."""
_MOST_BITS = 4096
_MOST_INDENT = 64
_WIDE = re.compile(r"\d{3}|\*|\{[^}]*\{")
"""In a format: a width of three digits, or one that is an argument."""


class TemplateTooCostly(Exception):
    """The budget is used up; the message says how."""


class Budget:
    """What one rendering may still use."""

    __slots__ = ("characters", "depth", "steps")

    def __init__(self, steps: int, characters: int) -> None:
        self.steps = steps
        """Operations; each looks at no more than 4096 characters."""
        self.characters = characters
        """Characters of text, and elements of lists, that may be made."""
        self.depth = 0
        """Calls within calls."""

    def step(self, count: int = 1) -> None:
        """Pay for work. Raises TemplateTooCostly."""
        self.steps -= count
        if self.steps < 0:
            raise TemplateTooCostly("it takes too many steps")

    def make(self, size: int) -> None:
        """Pay for text or a list of `size`. Raises TemplateTooCostly."""
        self.characters -= size
        if self.characters < 0:
            raise TemplateTooCostly("it makes too much text")

    def look(self, value: object, depth: int = 0) -> int:
        """Pay for going through `value`, nested as it may be: one object met twice is paid for twice. Returns how many
        characters its texts have together. Raises TemplateTooCostly."""
        if isinstance(value, str):
            self.step(1 + len(value) // _SCAN)
            return len(value)
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
_BUDGET: ContextVar[Budget] = ContextVar("_BUDGET")


def _made(value: Any) -> Any:
    """`value`, paid for."""
    if isinstance(value, str):
        _BUDGET.get().make(len(value))
    elif isinstance(value, (list, tuple, dict)):
        _BUDGET.get().make(_ELEMENT * len(value))
    return value


def _cut(text: str, pieces: int) -> None:
    """Pay for a list of parts of a text, before it is made."""
    budget = _BUDGET.get()
    budget.step(pieces // _SLOW_SCAN)
    budget.make(len(text) + _NEW_ELEMENT * pieces)


def _words(text: str) -> int:
    """How many words a text has at most."""
    return (len(text) + 1) // 2


def _parts(text: str, args: Sequence[object], kwargs: Mapping[str, object]) -> int:
    """How many parts `split` and `rsplit` cut a text into, at most."""
    sep = args[0] if args else kwargs.get("sep")
    maxsplit = args[1] if len(args) > 1 else kwargs.get("maxsplit")
    found = 1 + (text.count(sep) if isinstance(sep, str) and sep else _words(text))
    return min(found, maxsplit + 1) if isinstance(maxsplit, int) and maxsplit >= 0 else found


def _lines(text: str) -> int:
    return 1 + sum(map(text.count, _LINE_ENDS))


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    budget = _BUDGET.get()
    for value in values:
        budget.step()
        yield value


def _loop(values: Any) -> Any:
    """What a loop goes over; its length stays known where it is."""
    if isinstance(values, (list, tuple, range, dict)):
        _BUDGET.get().step(len(values))
        return values
    return _counted(values)


def _looked(value: Any) -> Any:
    """An operand of a comparison."""
    _BUDGET.get().look(value)
    return value


def _asked(value: Any) -> Any:
    """What another value is looked for in: a mapping finds it without going through its own."""
    if type(value) is dict:
        _BUDGET.get().step()
        return value
    return _looked(value)


def as_text(value: Any) -> str:
    """`value` as text, paid for by all that is written of it. Raises TemplateTooCostly."""
    if isinstance(value, str):
        return value
    budget = _BUDGET.get()
    budget.make(budget.look(value))
    text = str(value)
    budget.make(len(text))
    return text


def _concatenate(values: Iterable[Any]) -> str:
    parts = [as_text(v) for v in values]
    _BUDGET.get().make(sum(map(len, parts)))
    return "".join(parts)


def _replace(text: str, old: str, new: str, count: int = -1) -> str:
    budget = _BUDGET.get()
    budget.look(text)
    found = text.count(old) if count is None or count < 0 else min(count, text.count(old))
    budget.make(len(text) + found * len(new))
    return text.replace(old, new, found)


def _join(values: Iterable[Any], separator: str = "") -> str:
    parts = [as_text(v) for v in _counted(values)]
    _BUDGET.get().make(sum(map(len, parts)) + len(separator) * len(parts))
    return separator.join(parts)


def _checked_format(text: object, given: object) -> None:
    """Pay for `given`, which each field of a format may write whole."""
    budget = _BUDGET.get()
    size = budget.look(given)
    if isinstance(text, str):
        if _WIDE.search(text):
            raise TemplateTooCostly("it uses a format of unbounded width")
        budget.make(size * (text.count("%") + text.count("{")))


def _searched(name: str, text: object, given: Iterable[object]) -> None:
    """Pay for what `_PRODUCT` tells of, about a nanosecond for each pair of characters."""
    if name in _PRODUCT and isinstance(text, str):
        _BUDGET.get().step(len(text) * max((len(g) for g in given if isinstance(g, str)), default=0) // 1000)


def _checked_width(width: object) -> None:
    if (len(width) if isinstance(width, str) else width if isinstance(width, int) else 0) > _MOST_INDENT:
        raise TemplateTooCostly(f"it indents or separates by more than {_MOST_INDENT} characters")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja2's own filter escapes HTML, which no model was trained on.
    budget = _BUDGET.get()
    budget.make(budget.look(value))
    for width in (indent, *(separators or ())):
        _checked_width(width)
    return str(
        _made(json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys))
    )


_PASSED = (Context, Environment, nodes.EvalContext)
"""What jinja2 gives some filters before the value."""


def _through(name: str, text: str) -> None:
    """Pay for a filter that goes through a text by Python or by regular expressions."""
    if name in _EACH:
        _cut(text, len(text))
    elif name in ("title", "wordcount"):
        _cut(text, _words(text))
    elif name == "indent":
        _cut(text, _lines(text))
    elif name in ("e", "escape"):
        _BUDGET.get().make(5 * sum(map(text.count, "&<>'\"")))


def _paying(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of jinja2 that pays for its arguments and for its result."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if name in _OF_TEXT and args:
            args = (as_text(args[0]), *args[1:])
        given = (*args, *kwargs.values())
        budget = _BUDGET.get()
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
            _checked_format(args[0], given[1:])
        elif name == "indent":
            for width in given[1:]:
                _checked_width(width)
        _searched(name, args[0] if args else None, given[1:])
        result = function(*args, **kwargs)
        return _counted(result) if isinstance(result, Iterator) else _made(result)

    return call


def _paying_test(function: Callable[..., Any]) -> Callable[..., Any]:
    """A test of jinja2 that pays for going through its arguments."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        budget = _BUDGET.get()
        for value in args:
            budget.make(budget.look(value))
        return function(*args)

    return call


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration of the attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Of jinja2."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _instrument(node: nodes.Node) -> None:
    for child in list(node.iter_child_nodes()):
        _instrument(child)
    if isinstance(node, nodes.For):
        node.iter = _filtered(node.iter, "_loop")
    elif isinstance(node, nodes.Compare) and not _brief(node):
        if not isinstance(node.expr, nodes.Const):
            node.expr = _filtered(node.expr, "_looked")
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, "_asked" if operand.op in ("in", "notin") else "_looked")
    elif isinstance(node, nodes.Pair) and not isinstance(node.key, nodes.Const):
        node.key = _filtered(node.key, "_looked")
    for name in node.fields:
        value = getattr(node, name)
        if isinstance(value, nodes.Expr):
            setattr(node, name, _replaced(value))
        elif isinstance(value, list):
            value[:] = [_replaced(v) if isinstance(v, nodes.Expr) else v for v in value]


def _brief(node: nodes.Compare) -> bool:
    """Whether it compares with a constant of the template: no more of the other side is looked at than that is long."""
    (operand, *more) = node.ops
    constant = isinstance(node.expr, nodes.Const) or isinstance(operand.expr, nodes.Const)
    return constant and not more and operand.op in ("eq", "ne")


def _replaced(node: nodes.Expr) -> nodes.Expr:
    """What jinja2 compiles without asking the environment, as filters."""
    if isinstance(node, nodes.Concat):
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_concatenate")
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _filtered(node, "_made")
    return node


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates as transformers does. Compile and render `paying_from` a budget."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=as_text)
        self.filters = {name: _paying(name, self.filters[name]) for name in _FILTERS.split()}
        self.filters.update(
            join=_join,
            replace=_filter_replace,
            string=as_text,
            tojson=_tojson,
            _concatenate=_concatenate,
            _loop=_loop,
            _looked=_looked,
            _asked=_asked,
            _made=_made,
        )
        tests: dict[str, Any] = self.tests
        tests.update({name: _paying_test(tests[name]) for name in _TESTS.split()})
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _instrument(tree)
        return tree

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Of jinja2: how the pieces of the output, and of a macro's, become one text."""
        found = list(_counted(parts))
        _BUDGET.get().make(sum(map(len, found)))
        return "".join(found)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Of jinja2."""
        # By the kinds that its own stems from: a bool has a number's methods, and marked-up text those of text.
        allowed = next((_ALLOWED[kind] for kind in type(obj).__mro__ if kind in _ALLOWED), None)
        return super().is_safe_attribute(obj, attr, value) if allowed is None else attr in allowed

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Of jinja2."""
        format_text = super().wrap_str_format(value)
        if format_text is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _checked_format(value.__self__, [*args, kwargs])
            return format_text(*args, **kwargs)

        return checked

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Of jinja2."""
        _BUDGET.get().step()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Of jinja2, which hashes `argument`, and writes it where nothing is found."""
        budget = _BUDGET.get()
        budget.make(budget.look(argument))
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Of jinja2."""
        budget = _BUDGET.get()
        budget.step()
        if operator == "+":
            if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
                budget.make((len(left) + len(right)) * (1 if isinstance(left, str) else _ELEMENT))
        elif operator == "*":
            for one, times in ((left, right), (right, left)):
                if isinstance(one, (str, list, tuple)) and isinstance(times, int):
                    budget.make(len(one) * max(times, 0) * (1 if isinstance(one, str) else _ELEMENT))
        elif operator == "%" and isinstance(left, str):
            _checked_format(left, right)
            return _made(super().call_binop(context, operator, left, right))
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MOST_BITS:
                raise TemplateTooCostly(f"it computes with numbers of more than {_MOST_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Of jinja2, which calls it so that any name may be an argument."""
        budget = _BUDGET.get()
        budget.step()
        # A macro's body pays for what it does with its arguments; all else may hash, compare or write them.
        if not isinstance(__obj, Macro):
            budget.make(budget.look((*args, *kwargs.values())))
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (list, tuple)) and __obj.__name__ in ("count", "index"):
            budget.look(owner)
        elif isinstance(owner, str):
            budget.look(owner)
            name = __obj.__name__
            _searched(name, owner, args)
            if name == "replace":
                return _replace(owner, *args, **kwargs)
            if name == "join":
                return _join(args[0], owner)
            if name in ("rsplit", "split"):
                _cut(owner, _parts(owner, args, kwargs))
            elif name == "splitlines":
                _cut(owner, _lines(owner))
        # Not left to the interpreter: a call of a macro takes the C stack, which ends before its limit where a library
        # has raised that.
        if budget.depth >= _MOST_DEPTH:
            raise TemplateTooCostly(f"it calls more than {_MOST_DEPTH} macros within each other")
        budget.depth += 1
        try:
            return _made(super().call(__context, __obj, *args, **kwargs))
        finally:
            budget.depth -= 1


def _filter_replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    return _replace(as_text(text), as_text(old), as_text(new), -1 if count is None else count)


@contextmanager
def paying_from(budget: Budget) -> Iterator[None]:
    """What templates do meanwhile in this thread or task is paid from `budget`."""
    token = _BUDGET.set(budget)
    try:
        yield
    finally:
        _BUDGET.reset(token)
