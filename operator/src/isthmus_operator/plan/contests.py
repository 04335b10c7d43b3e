"""Pure: objects that somebody else keeps changing, for example an HPA aimed at one of our Deployments.

Each change of theirs makes and removes pods, and so does each answer of ours. A change by hand is reverted at once.
One that comes again and again is reverted after growing pauses, and the service's other objects at once. What an
admission policy changes as it is written is written once, and then left until either side wants something else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Key = tuple[str, str]
"""Namespace and name of a service."""
Name = tuple[str, str]
"""Kind and name of an object."""

WITHIN_S = 60.0
MANY = 3
"""So many times put right WITHIN_S make a contest."""
FIRST_S, MOST_S = 15.0, 300.0
"""How long it is left alone then; twice as long after each further time."""


@dataclass(slots=True)
class _Contest:
    """times: when it was lately put right; pause: 0 until it is a contest; until: when that pause ends."""

    times: list[float]
    pause: float = 0.0
    until: float = 0.0


class Contests:
    """Who changes what of all services. Times are seconds on one clock. A new process begins with none."""

    def __init__(self) -> None:
        self._found: dict[Key, dict[Name, _Contest]] = {}
        self._futile: dict[Key, dict[Name, str]] = {}

    def left_alone(self, key: Key, now: float) -> dict[Name, float]:
        """Objects that are not put right now, and when they may be."""
        return {name: one.until for name, one in self._found.get(key, {}).items() if one.until > now}

    def put_right(self, key: Key, names: Iterable[Name], now: float) -> tuple[list[Name], list[Name]]:
        """Note what was put right. Those to tell of as such, and those that have become a contest by it."""
        found = self._found.setdefault(key, {})
        for name in [name for name, one in found.items() if max(one.times[-1], one.until) + WITHIN_S < now]:
            del found[name]
        single, contested = [], []
        for name in names:
            one = found.setdefault(name, _Contest([]))
            one.times = [at for at in one.times if at >= now - WITHIN_S] + [now]
            if one.pause:
                one.pause = min(2 * one.pause, MOST_S)
            elif len(one.times) >= MANY:
                one.pause = FIRST_S
                contested.append(name)
            else:
                single.append(name)
            one.until = now + one.pause if one.pause else 0.0
        if not found:
            del self._found[key]
        return single, contested

    def futile(self, key: Key) -> dict[Name, str]:
        """Objects that do not become what is written of them, and how each was left."""
        return self._futile.get(key, {})

    def left(self, key: Key, futile: dict[Name, str]) -> list[Name]:
        """Note those of the last run. The ones to tell of, which were none in the run before."""
        new = [name for name in futile if name not in self.futile(key)]
        if futile:
            self._futile[key] = futile
        else:
            self._futile.pop(key, None)
        return new

    def forget(self, key: Key) -> None:
        """The service is gone."""
        self._found.pop(key, None)
        self._futile.pop(key, None)
