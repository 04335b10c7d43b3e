"""An event loop on which waiting takes no time, for tests whose only other side is in the same loop."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class JumpingLoop(asyncio.SelectorEventLoop):
    """Its time is that of the next timer as soon as there is nothing else to do. Not for sockets."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        ready, timers = self._ready, self._scheduled  # type: ignore[attr-defined]
        if not ready and timers:
            self.now = max(self.now, timers[0].when())
        super()._run_once()  # type: ignore[misc]


def run_jumping(main: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run` on such a loop."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(main)
