"""The numbers of docs/bounds.md are those of the code."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from isthmus_runtime.serve_flags import build_serve_parser

PAGE = Path(__file__).parents[2] / "docs" / "bounds.md"
TOLD = re.compile(r"(\d[\d,.]*) ?(Ki|KiB|MiB|GiB|ms)?\b[^|(\d;]*?\(`([-.\w]+)`\)")
UNITS = {"": 1, "Ki": 1 << 10, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "ms": 0.001}


def told() -> list[tuple[str, str, float]]:
    """Of each number: the module of its row, what it is called there, and the number."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    return [
        (row[-1].strip("`"), name, float(number.replace(",", "")) * UNITS[unit])
        for row in rows
        for number, unit, name in TOLD.findall(" | ".join(row))
    ]


def of_code(where: str, name: str) -> float:
    if name.startswith("--"):
        text = str(build_serve_parser().get_default(name.removeprefix("--").replace("-", "_")))
        found = re.fullmatch(r"(\d+)(Mi|s)?", text)
        assert found is not None, f"{name} is {text!r} by default"
        return int(found[1]) * (1 << 20 if found[2] == "Mi" else 1)
    at: object = import_module("isthmus_runtime." + where.removesuffix(".py").replace("/", "."))
    for part in name.split("."):
        at = getattr(at, part)
        at = at() if isinstance(at, type) else at
    assert isinstance(at, int | float)
    return at


@pytest.mark.parametrize(("where", "name", "number"), told())
def test_numbers_are_those_of_the_code(where: str, name: str, number: float) -> None:
    assert of_code(where, name) == pytest.approx(number)


def test_the_page_tells_numbers() -> None:
    assert len(told()) >= 40
