"""Everything that is wrong with a request in one error, and no more of it than a person reads."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..errors import InvalidRequest

MAX_PROBLEMS = 8
"""Most that an answer lists: a body of megabytes may have a million."""
MAX_NAME = 64
"""Characters of a client's own names in them."""


def invalid(problems: Sequence[tuple[str, str]], *, more: int = 0) -> InvalidRequest:
    """The error of these (parameter, text), of which there is one at least, and of `more` that are not among them."""
    texts = list(dict.fromkeys(text for _, text in problems))
    more += max(0, len(texts) - MAX_PROBLEMS)
    texts = [*texts[:MAX_PROBLEMS], *([f"and {more} more problems"] if more else [])]
    return InvalidRequest("; ".join(texts), param=problems[0][0])


def object_at(value: Any, path: str) -> dict[str, Any]:
    """`value`, which must be a JSON object. InvalidRequest names `path`."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path}: must be an object", param=path)
    return value


def fields_at(
    value: Any, path: str, known: Collection[str], neutral: Mapping[str, tuple[object, ...]] | None = None
) -> dict[str, Any]:
    """`value`, which must be a JSON object, without what is null.

    InvalidRequest names the first field that is neither in `known` nor has one of its values in `neutral`, which ask
    for nothing.
    """
    given = {name: field for name, field in object_at(value, path).items() if field is not None}
    for name, field in given.items():
        if name in known:
            continue
        where = f"{path}.{name[:MAX_NAME]}"
        accepted = (neutral or {}).get(name)
        if accepted is None:
            raise InvalidRequest(f"{where}: unknown parameter; remove it", param=where)
        if field not in accepted:
            values = " or ".join(map(json.dumps, accepted))
            raise InvalidRequest(f"{where}: not supported; remove it or set it to {values}", param=where)
    return given
