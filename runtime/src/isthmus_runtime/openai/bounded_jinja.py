"""Jinja2 in its immutable sandbox, with every operation paid for: rendering ends within a number of steps and of made
characters, however a template loops, repeats or pads. Jinja2's own sandbox keeps a template from Python's insides, and
bounds nothing but `range`.

A step is about a microsecond. Loops and comparisons are counted through the syntax tree, attribute access and calls
through the sandbox's hooks, what filters and methods do by `paid_operations`. Filters and methods are allow-lists, so
that nothing is free by oversight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from . import paid_operations as paid

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
_MOST_DEPTH = 64
_MOST_BITS = 4096


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
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=paid.as_text
        )
        self.filters = {name: paid.paying(name, self.filters[name]) for name in _FILTERS.split()}
        self.filters.update(
            join=paid.join,
            replace=paid.filter_replace,
            string=paid.as_text,
            tojson=paid.tojson,
            _concatenate=paid.concatenate,
            _loop=paid.loop,
            _looked=paid.looked,
            _asked=paid.asked,
            _made=paid.made,
        )
        tests: dict[str, Any] = self.tests
        tests.update({name: paid.paying_test(tests[name]) for name in _TESTS.split()})
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _instrument(tree)
        return tree

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Overrides jinja2's: how the pieces of the output, and of a macro's, become one text."""
        budget, found, size = paid.BUDGET.get(), list[str](), 0
        for part in paid.counted(parts):
            found.append(part)
            size += paid.size_of(part)
            if size > budget.most:
                break  # it is too much already
        budget.make(max(size, paid.size_of(*found)))
        return "".join(found)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Overrides jinja2's."""
        # By the kinds that its own stems from: a bool has a number's methods, and marked-up text those of text.
        allowed = next((_ALLOWED[kind] for kind in type(obj).__mro__ if kind in _ALLOWED), None)
        return super().is_safe_attribute(obj, attr, value) if allowed is None else attr in allowed

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Overrides jinja2's."""
        format_text = super().wrap_str_format(value)
        if format_text is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            paid.checked_format(value.__self__, [*args, kwargs])
            return format_text(*args, **kwargs)

        return checked

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Overrides jinja2's."""
        paid.BUDGET.get().step()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Overrides jinja2's, which hashes `argument`, and writes it where nothing is found."""
        budget = paid.BUDGET.get()
        budget.make(budget.look(argument))
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Overrides jinja2's."""
        budget = paid.BUDGET.get()
        budget.step()
        if operator == "+":
            if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
                if isinstance(left, str) and isinstance(right, str):
                    budget.make(paid.size_of(left, right))
                else:
                    budget.make(paid.ELEMENT * (len(left) + len(right)))
        elif operator == "*":
            for one, times in ((left, right), (right, left)):
                if isinstance(one, (str, list, tuple)) and isinstance(times, int):
                    size = paid.size_of(one) if isinstance(one, str) else paid.ELEMENT * len(one)
                    budget.make(size * max(times, 0))
        elif operator == "%" and isinstance(left, str):
            paid.checked_format(left, right)
            return paid.made(super().call_binop(context, operator, left, right))
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MOST_BITS:
                raise paid.TemplateTooCostly(f"it computes with numbers of more than {_MOST_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Overrides jinja2's, which calls it so that any name may be an argument."""
        budget = paid.BUDGET.get()
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
            paid.searched(name, owner, args)
            if name == "replace":
                return paid.replace(owner, *args, **kwargs)
            if name == "join":
                return paid.join(args[0], owner)
            if name in ("rsplit", "split"):
                paid.cut(owner, paid.parts(owner, args, kwargs))
            elif name == "splitlines":
                paid.cut(owner, paid.lines(owner))
        # Not left to the interpreter: a call of a macro takes the C stack, which ends before its limit where a library
        # has raised that.
        if budget.depth >= _MOST_DEPTH:
            raise paid.TemplateTooCostly(f"it calls more than {_MOST_DEPTH} macros within each other")
        budget.depth += 1
        try:
            return paid.made(super().call(__context, __obj, *args, **kwargs))
        finally:
            budget.depth -= 1
