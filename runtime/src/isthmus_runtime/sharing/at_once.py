"""How much of a text a thread may tokenise at a time: as much as memory was set aside for.

What a body's texts become is known once it is read, rendered and cut, and memory is set aside before: by a guess, which
is held here against what comes of it. Where it was too low the work ends, and begins again with more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

_A = TypeVar("_A")
_M = TypeVar("_M")


class TakesMore(Exception):
    """`letters` would be tokenised at a time."""

    def __init__(self, letters: int) -> None:
        super().__init__(f"{letters} characters at a time")
        self.letters = letters


class _Allowed(threading.local):
    letters: int | None = None


_allowed = _Allowed()


def may_take(letters: int) -> None:
    """Called before so many are tokenised. TakesMore: memory was set aside for fewer."""
    if _allowed.letters is not None and letters > _allowed.letters:
        raise TakesMore(letters)


def within(letters: int, make: Callable[[_A], _M], what: _A) -> _M | TakesMore:
    """What `make` makes of `what`, tokenising so many at a time, or that it would take more."""
    _allowed.letters = letters
    try:
        return make(what)
    except TakesMore as more:
        return TakesMore(more.letters)  # without the frames of the other, which hold the body
    finally:
        _allowed.letters = None
