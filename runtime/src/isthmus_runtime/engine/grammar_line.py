"""Whose grammar is compiled next. Pure; its owner locks.

What the API has checked once passes it from then on, while an engine keeps few compiled: a circle of costly ones would
have everybody else's wait for as long as it goes round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

_T = TypeVar("_T")
_BY_AGE = 4
"""One in so many goes by age, so that long ones have their turn."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting(Generic[_T]):
    whose: str
    size: int
    work: _T


class GrammarLine(Generic[_T]):
    """First what belongs to whoever has used least while somebody waited, then what is short: of compiling, length is
    all that is known before."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting[_T]] = []
        """In the order of coming."""
        self._used: dict[str, float] = {}
        self._count = 0

    def add(self, whose: str, size: int, work: _T) -> None:
        """`whose`: whom the request belongs to, as far as an engine knows. `size`: characters."""
        self._waiting.append(_Waiting(whose, size, work))

    def next(self) -> tuple[str, _T]:
        """Take one away."""
        self._count += 1
        if self._count % _BY_AGE == 0:
            found = self._waiting[0]
        else:
            found = min(self._waiting, key=lambda one: (self._used.get(one.whose, 0.0), one.size))
        self._waiting.remove(found)
        return found.whose, found.work

    def took(self, whose: str, seconds: float) -> None:
        """It has been compiled. Of whom nobody waits is forgotten."""
        self._used[whose] = self._used.get(whose, 0.0) + seconds
        there = {one.whose for one in self._waiting}
        self._used = {one: used for one, used in self._used.items() if one in there}
