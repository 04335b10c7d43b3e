"""Jinja2 in its immutable sandbox, with every operation paid for: rendering ends within a number of steps and of made
characters, however a template loops, repeats or pads. Jinja2's own sandbox keeps a template from Python's insides, and
bounds nothing but `range`.

A step is about a microsecond. Loops and comparisons are counted through the syntax tree, attribute access and calls
through the sandbox's hooks; what makes text or lists is paid for before it is made where its size does not follow from
what went in, else after. Filters and methods are allow-lists, so that nothing is free by oversight.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

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
}
_ALLOWED = {kind: frozenset(names.split()) for kind, names in _METHODS.items()}
_SCAN = 4096
"""Characters that one step looks at."""
_MOST_DEPTH = 64
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

    def look(self, value: object) -> None:
        """Pay for going through `value`, nested as it may be: one object met twice is paid for twice."""
        if isinstance(value, str):
            self.step(1 + len(value) // _SCAN)
        elif isinstance(value, (list, tuple)):
            self.step()
            for item in value:
                self.look(item)
        elif isinstance(value, Mapping):
            self.step()
            for key, item in value.items():
                self.look(key)
                self.look(item)
        else:
            self.step(1 + (len(value) if isinstance(value, Sized) else 0))


_BUDGET: ContextVar[Budget] = ContextVar("_BUDGET")


def _made(value: Any) -> Any:
    """`value`, paid for."""
    if isinstance(value, (str, list, tuple, dict)):
        _BUDGET.get().make(len(value))
    return value


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


def _text(value: Any) -> str:
    """As text: of a nested value everything in it is written."""
    if isinstance(value, str):
        return value
    budget = _BUDGET.get()
    budget.look(value)
    text = str(value)
    budget.make(len(text))
    return text


def _concatenate(values: Iterable[Any]) -> str:
    parts = [_text(v) for v in values]
    _BUDGET.get().make(sum(map(len, parts)))
    return "".join(parts)


def _replace(text: str, old: str, new: str, count: int = -1) -> str:
    budget = _BUDGET.get()
    budget.look(text)
    found = text.count(old) if count is None or count < 0 else min(count, text.count(old))
    budget.make(len(text) + found * len(new))
    return text.replace(old, new, found)


def _join(values: Iterable[Any], separator: str = "") -> str:
    parts = [_text(v) for v in _counted(values)]
    _BUDGET.get().make(sum(map(len, parts)) + len(separator) * len(parts))
    return separator.join(parts)


def _checked_format(text: object) -> None:
    if isinstance(text, str) and _WIDE.search(text):
        raise TemplateTooCostly("it uses a format of unbounded width")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja2's own filter escapes HTML, which no model was trained on.
    _BUDGET.get().look(value)
    if isinstance(indent, str) or (indent or 0) > _MOST_INDENT:
        raise TemplateTooCostly("it uses an indent of unbounded width")
    return str(
        _made(json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys))
    )


def _paying(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of jinja2 that pays for its arguments and for its result."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        for value in given:
            _BUDGET.get().look(value)
        if name == "format":
            _checked_format(args[0])
        elif name == "indent" and any(isinstance(v, int) and v > _MOST_INDENT for v in given):
            raise TemplateTooCostly("it uses an indent of unbounded width")
        result = function(*args, **kwargs)
        return _counted(result) if isinstance(result, Iterator) else _made(result)

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
    elif isinstance(node, nodes.Compare):
        node.expr = _filtered(node.expr, "_looked")
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, "_looked")
    for name in node.fields:
        value = getattr(node, name)
        if isinstance(value, nodes.Expr):
            setattr(node, name, _replaced(value))
        elif isinstance(value, list):
            value[:] = [_replaced(v) if isinstance(v, nodes.Expr) else v for v in value]


def _replaced(node: nodes.Expr) -> nodes.Expr:
    """What jinja2 compiles without asking the environment, as filters."""
    if isinstance(node, nodes.Concat):
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_concatenate")
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _filtered(node, "_made")
    return node


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates as transformers does. Compile and render `paying_from` a budget."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_text)
        self.filters = {name: _paying(name, self.filters[name]) for name in _FILTERS.split()}
        self.filters.update(
            join=_join,
            replace=_filter_replace,
            string=_text,
            tojson=_tojson,
            _concatenate=_concatenate,
            _loop=_loop,
            _looked=_looked,
            _made=_made,
        )
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
        allowed = _ALLOWED.get(type(obj))
        return super().is_safe_attribute(obj, attr, value) if allowed is None else attr in allowed

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Of jinja2."""
        format_text = super().wrap_str_format(value)
        if format_text is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _checked_format(value.__self__)
            _BUDGET.get().look([*args, kwargs])
            return format_text(*args, **kwargs)

        return checked

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Of jinja2."""
        _BUDGET.get().step()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Of jinja2."""
        _BUDGET.get().step()
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Of jinja2."""
        budget = _BUDGET.get()
        budget.step()
        if operator == "+":
            if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
                budget.make(len(left) + len(right))
        elif operator == "*":
            for one, times in ((left, right), (right, left)):
                if isinstance(one, (str, list, tuple)) and isinstance(times, int):
                    budget.make(len(one) * max(times, 0))
        elif operator == "%" and isinstance(left, str):
            _checked_format(left)
            budget.look(right)
            return _made(super().call_binop(context, operator, left, right))
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MOST_BITS:
                raise TemplateTooCostly(f"it makes a number of more than {_MOST_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Of jinja2, which calls it so that any name may be an argument."""
        budget = _BUDGET.get()
        budget.step()
        if isinstance(owner := getattr(__obj, "__self__", None), str):
            budget.look(owner)
            name = __obj.__name__
            if name == "replace":
                return _replace(owner, *args, **kwargs)
            if name == "join":
                return _join(args[0], owner)
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
    return _replace(_text(text), _text(old), _text(new), -1 if count is None else count)


@contextmanager
def paying_from(budget: Budget) -> Iterator[None]:
    """What templates do meanwhile in this thread or task is paid from `budget`."""
    token = _BUDGET.set(budget)
    try:
        yield
    finally:
        _BUDGET.reset(token)
