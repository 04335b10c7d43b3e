"""Threads of clients that wait for the one place at something, by the time that each client's have taken."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MOST_REMEMBERED = 1024
"""Clients whose time is remembered: those that have taken most, as one may come by as many addresses as it has."""
_LOOK_S = 0.1
"""Between two times that a thread asks whether it is still waited for."""


class FairLine:
    """One thread at a time, by start-time fair queueing (Goyal, Vin and Cheng 1996): a client's work begins where its
    last one ended, or where the one that is served did, whichever is later; the earliest is next. So whose works take
    least go first, and nobody has credit for a time without any. Nor is what was taken while nobody waited held against
    anybody: where the line is empty, it begins anew."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[object]] = OrderedDict()
        self._has: object | None = None
        self._now = 0.0
        """Where the work that is served began, in seconds of this line."""
        self._ended: dict[str, float] = {}
        """Where a client's last work did, if later."""

    @contextmanager
    def turn(self, who: str, check: Callable[[], None]) -> Iterator[None]:
        """`check` raises where it is waited for no more. What is done within counts as the client's."""
        me = object()
        with self._changed:
            self._waiting.setdefault(who, deque()).append(me)
            self._next()
            try:
                while self._has is not me:
                    self._changed.wait(_LOOK_S)
                    check()
            except BaseException:
                self._leave(who, me)
                raise
            start, begun = self._now, self._clock()
        try:
            yield
        finally:
            with self._changed:
                self._ended[who] = start + self._clock() - begun
                if len(self._ended) > MOST_REMEMBERED:
                    del self._ended[min(self._ended, key=self._ended.__getitem__)]
                self._has = None
                self._next()

    def _start(self, who: str) -> float:
        return max(self._now, self._ended.get(who, 0.0))

    def _next(self) -> None:
        if self._has is not None:
            return
        if self._waiting:
            who = min(self._waiting, key=self._start)
            self._now = self._start(who)
            self._ended = {name: end for name, end in self._ended.items() if end > self._now}
            mine = self._waiting.pop(who)
            self._has = mine.popleft()
            if mine:
                self._waiting[who] = mine  # behind all others
            self._changed.notify_all()
        else:
            self._now, self._ended = 0.0, {}

    def _leave(self, who: str, me: object) -> None:
        if self._has is me:
            self._has = None
            self._next()
            return
        self._waiting[who].remove(me)
        if not self._waiting[who]:
            del self._waiting[who]
