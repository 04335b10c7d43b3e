"""The threads that an engine needs until its end: one that has ended is a fault that no request would tell of."""

from __future__ import annotations

import threading

_NAMES = frozenset(
    {
        *("engine", "masks", "drafts", "executor", "executor-completion", "adapter-file", "channel-in"),
        *("transfer-direct", "transfer-greeter", "transfer-store", "memory-fabric"),
    }
)
"""Of all threads that are started once. Those that serve one call, and pools of them, may end."""
_RANK = "rank-"
"""With its number: who waits for the process of another rank. An idle engine would not miss it."""


def _needed(name: str) -> bool:
    return name in _NAMES or name.startswith(_RANK)


class LongLived:
    """Those that run when this is made, after the start of everything."""

    def __init__(self) -> None:
        self._threads = tuple(thread for thread in threading.enumerate() if _needed(thread.name))

    @property
    def names(self) -> tuple[str, ...]:
        """Whom it looks after."""
        return tuple(thread.name for thread in self._threads)

    def problem(self) -> str:
        """Empty, or who has ended."""
        ended = sorted({thread.name for thread in self._threads if not thread.is_alive()})
        return f"the thread {' and '.join(ended)} has ended; the log of this process has the details" if ended else ""
