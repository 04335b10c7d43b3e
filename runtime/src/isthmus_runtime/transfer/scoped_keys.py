"""Which keys in the storage pool belong to one attempt, and who removes them. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def is_scoped(key: str) -> bool:
    """Keys of one attempt; all others are shared by content."""
    return ":partial:" in key or key.startswith("record:")


class ScopedKeys:
    """Decode removes the keys it awaits, when it has them or gives up. Prefill's stay until decode did, and are swept
    in case decode could not. Not thread-safe: its owner locks."""

    def __init__(self) -> None:
        self._keys: dict[str, set[str]] = {}
        self._written: set[str] = set()
        """Attempts of prefill."""

    def expect(self, attempt: str, keys: Iterable[str]) -> None:
        """Decode's: another process will put them."""
        self._keys[attempt] = set(keys)

    def write(self, attempt: str, keys: Iterable[str]) -> bool:
        """Prefill's: about to be put. True for the first of the attempt: a sweep has to come."""
        first = attempt not in self._keys
        if first:
            self._written.add(attempt)
        self._keys.setdefault(attempt, set()).update(keys)
        return first

    def end_with(self, attempt: str) -> bool:
        """Whether the attempt's keys go when it is over."""
        return attempt in self._keys and attempt not in self._written

    def pop(self, attempt: str) -> list[str]:
        """What is to be removed now, in order; nobody has to any more."""
        self._written.discard(attempt)
        return sorted(self._keys.pop(attempt, ()))
