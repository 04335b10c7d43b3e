"""How long this process has attended to its event loop: a router that was held up must not blame its engines for it."""

from __future__ import annotations

import asyncio

STEP_S = 0.1
MOST_S = 0.5
"""So much of a late step is counted: under load every step is late, and engines may be gone as well."""


class OwnTime:
    """Seconds, without those in which nothing of this process ran: answers may have come that nobody has read."""

    def __init__(self) -> None:
        self.now = 0.0

    async def run(self) -> None:
        """Count, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await asyncio.sleep(STEP_S)
            self.now += min(loop.time() - began, MOST_S)
