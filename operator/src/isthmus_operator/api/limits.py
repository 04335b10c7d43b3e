"""How large a spec may be. Looked at first, so that nothing behind it takes long, whatever the API server stores.

The CRD has the same bounds where a schema can say them: not for what is passed through unread (`podPatch`, `affinity`,
`tolerations`), nor for depth or for a resource as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from ..errors import Problem

MOST_VALUES = 4096
"""Mappings, lists and scalars together. The largest that is meant seriously, five pods patched at length, has 1,500."""
MOST_CHARACTERS = 128 * 1024
"""Of all texts and field names together."""
MOST_TEXT = 16 * 1024
MOST_ITEMS = 256
MOST_FIELDS = 128
MOST_NAME = 316
"""Characters of a field's name: of a label with its prefix, the longest there is."""
MOST_DEPTH = 24
MOST_NUMBER = 2**63 - 1
MOST_PROBLEMS = 64
"""Reported at once. Nobody reads more, and whoever sends a million mistakes is not to get a million answers."""


def too_large(spec: object) -> list[Problem]:
    """What is beyond the limits, found in at most MOST_VALUES steps; empty when nothing is."""
    found: list[Problem] = []
    values = characters = 0
    left: list[tuple[str, int, object]] = [("spec", 1, spec)]
    while left and len(found) < MOST_PROBLEMS:
        path, depth, value = left.pop()
        values += 1
        if values > MOST_VALUES:
            return [*found, _problem("spec", "holds too many values", f"{MOST_VALUES} or fewer, all in all")]
        if isinstance(value, Mapping | list | tuple) and depth > MOST_DEPTH:
            found.append(_problem(path, "lies too deep", f"{MOST_DEPTH} levels of mappings and lists"))
        elif isinstance(value, Mapping):
            if len(value) > MOST_FIELDS:
                found.append(_problem(path, f"has more than {MOST_FIELDS} fields", f"{MOST_FIELDS} or fewer"))
                continue
            odd = next((name for name in value if not isinstance(name, str)), None)
            if odd is not None:  # of YAML: a date or a number that is not quoted
                found.append(
                    _problem(path, f"has the key {str(odd)[:MOST_NAME]}, which is no text", "text", "quote it")
                )
                continue
            names = list(value)
            characters += sum(map(len, names))
            if any(len(name) > MOST_NAME for name in names):
                found.append(_problem(path, "has a field with too long a name", f"{MOST_NAME} characters or fewer"))
                continue
            left += [(f"{path}.{name}", depth + 1, one) for name, one in zip(names, value.values(), strict=True)]
        elif isinstance(value, list | tuple):
            if len(value) > MOST_ITEMS:
                found.append(_problem(path, f"has more than {MOST_ITEMS} items", f"{MOST_ITEMS} or fewer"))
                continue
            left += [(f"{path}[{index}]", depth + 1, one) for index, one in enumerate(value)]
        elif isinstance(value, str):
            characters += len(value)
            if len(value) > MOST_TEXT:
                found.append(_problem(path, f"has {len(value)} characters", f"{MOST_TEXT} or fewer"))
        elif isinstance(value, int | float) and not -MOST_NUMBER <= value <= MOST_NUMBER:
            found.append(_problem(path, "is out of range", f"a number of at most {MOST_NUMBER}"))
    if not found and characters > MOST_CHARACTERS:
        found.append(_problem("spec", f"has {characters} characters", f"{MOST_CHARACTERS} or fewer, all in all"))
    return found


def most(problems: Iterable[Problem]) -> list[Problem]:
    """The first MOST_PROBLEMS, and whether there are more."""
    left = iter(problems)
    found = list(islice(left, MOST_PROBLEMS))
    if next(left, None) is not None:
        found.append(_problem("spec", f"has more than these {MOST_PROBLEMS} problems", "none", "correct these first"))
    return found


def _problem(path: str, message: str, allowed: str, fix: str = "make it smaller") -> Problem:
    return Problem(path, message, allowed, fix)
