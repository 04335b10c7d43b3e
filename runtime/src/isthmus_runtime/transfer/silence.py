"""Who has just kept silent for the whole of a timeout: it is left alone for a while, so that the few threads that wait
for answers are there for others. Pure."""

from __future__ import annotations

from collections.abc import Callable


class Silence:
    """Addresses that are not to be tried. Any thread. `clock`: seconds; `lasts_s`: for how long."""

    def __init__(self, clock: Callable[[], float], lasts_s: float) -> None:
        self._clock = clock
        self._lasts_s = lasts_s
        self._until: dict[str, float] = {}

    def note(self, address: str) -> None:
        """It has kept silent until now."""
        now = self._clock()
        self._until = {other: until for other, until in self._until.copy().items() if now < until}
        self._until[address] = now + self._lasts_s

    def over(self, address: str) -> None:
        """It has answered."""
        self._until.pop(address, None)

    def lets_try(self, address: str) -> bool:
        """Whether it may be tried now. Of several who ask for one that has been left alone long enough, one may: what
        it hears is said to all."""
        if address not in self._until:
            return True
        if self.holds(address):
            return False
        self._until[address] = self._clock() + self._lasts_s
        return True

    def holds(self, address: str) -> bool:
        """Whether it has kept silent a moment ago."""
        return self._clock() < self._until.get(address, 0.0)
