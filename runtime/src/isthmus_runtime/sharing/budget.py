"""What all requests may hold together, where each is known before it is taken. Pure, of one event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

from ..errors import Overloaded, RequestError
from .giving_way import Held, who_gives_way
from .shares import Shares

_RETRY_AFTER_S = 1.0
_NOTHING = nullcontext[Callable[[], None]](lambda: None)
End = Callable[[RequestError], None]
"""Ends a request with an error."""


@dataclass(frozen=True, eq=False, slots=True)
class _Holding:
    who: str
    count: int
    end: End | None


class Budget:
    """What all requests may hold of something. One client leaves room for the largest request of another, and what is
    small is not counted: whoever has most would keep everybody out."""

    def __init__(self, most: int, each: int, of: str, small: int = 0) -> None:
        """`most`: at least `each`, what one request may ask for, or the largest would never be served. `of` what.
        `small`: what a request may hold without being counted."""
        assert most >= each, f"{most} {of} for all requests, but one may ask for {each}"
        self.most = most
        self.small = small
        self._of = of
        self._share = max(each, most - each)
        """Of one client."""
        self._of_client = Shares()
        self._running: set[_Holding] = set()

    @property
    def held(self) -> int:
        """What the requests that run hold."""
        return self._of_client.all

    def holding(self, count: int, who: str = "", end: End | None = None) -> AbstractContextManager[Callable[[], None]]:
        """Within, a request of a client, where that is known, holds `count`; what it gives releases them before its
        end. Where there is no room, the largest request of the client that has most ends (429, by its `end`). Raises
        Overloaded (429) where that would be this one's client, or it has its share."""
        return self._holding(count, who, end) if count > self.small else _NOTHING

    @contextmanager
    def _holding(self, count: int, who: str, end: End | None) -> Iterator[Callable[[], None]]:
        one = _Holding(who, count, end)
        self._make_room(one)
        self._running.add(one)
        self._of_client.add(who, count)
        release = partial(self._release, one)
        try:
            yield release
        finally:
            release()

    def _make_room(self, new: _Holding) -> None:
        if new.who and self._of_client[new.who] + new.count > self._share:
            raise self._too_many(new)
        excess = self.held + new.count - self.most
        if excess <= 0:
            return
        # A little more than it is: of two clients that have as much the one that comes is refused.
        held = [Held(one.who, 2 * one.count, one) for one in self._running if one.end is not None]
        gone = who_gives_way([*held, Held(new.who, 2 * new.count + 1, new)], 2 * excess)
        if any(one.client == new.who for one in gone) or sum(one.size for one in gone) < 2 * excess:
            raise self._too_many(new)
        for one in gone:
            self._release(one.what)
            assert one.what.end is not None
            one.what.end(self._too_many(one.what))

    def _release(self, one: _Holding) -> None:
        if one not in self._running:
            return
        self._running.remove(one)
        self._of_client.add(one.who, -one.count)

    def _too_many(self, one: _Holding) -> Overloaded:
        return Overloaded(
            f"{one.count} {self._of}: requests that run have {self.held}, and all together may have {self.most}, "
            f"those of one client {self._share}; retry later, or ask for less in a request",
            status=429,
            retry_after_s=_RETRY_AFTER_S,
        )
