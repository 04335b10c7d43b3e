"""Who has just kept silent for the whole of a timeout: it is left alone for a while, and then tried by one at a time.
So the few threads that wait for answers are there for others. Pure."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Silence:
    """Addresses that are not to be tried. Any thread."""

    def __init__(self, clock: Callable[[], float], lasts_s: float, try_s: float = 0.0) -> None:
        """`clock`: seconds; `lasts_s`: for how long; `try_s`: how long a try may take, for whose end others wait."""
        self._clock = clock
        self._lasts_s = lasts_s
        self._try_s = try_s
        self._lock = threading.Lock()
        self._until: dict[str, float] = {}

    def note(self, address: str) -> None:
        """It has kept silent until now."""
        now = self._clock()
        with self._lock:
            self._until = {other: until for other, until in self._until.items() if now < until}
            self._until[address] = now + self._lasts_s

    def over(self, address: str) -> None:
        """It has answered."""
        with self._lock:
            self._until.pop(address, None)

    def lets_try(self, address: str) -> bool:
        """Whether it may be tried now. Of several who ask for one that has been left alone long enough, one may: what
        it hears is said to all."""
        now = self._clock()
        with self._lock:
            until = self._until.get(address)
            if until is not None and now >= until:
                self._until[address] = now + self._try_s + self._lasts_s
        return until is None or now >= until

    def holds(self, address: str) -> bool:
        """Whether it has kept silent a moment ago."""
        with self._lock:
            return self._clock() < self._until.get(address, 0.0)
