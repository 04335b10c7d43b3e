"""Everything that is wrong with a request in one error, and no more of it than a person reads."""

from __future__ import annotations

from collections.abc import Sequence
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
