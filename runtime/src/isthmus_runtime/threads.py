"""Pools of threads that run before they are needed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

_START_S = 30.0


def running_pool(count: int, name: str) -> ThreadPoolExecutor:
    """A pool whose `count` threads, called `name`_N, run already.

    `ThreadPoolExecutor` by itself makes them when there is work. A thread that is made when the process has no memory
    left may end before it has begun, and who starts a thread waits for its beginning without a deadline: an event loop
    or an engine would stand still for ever. Raises RuntimeError when they do not all run within half a minute.
    """
    pool = ThreadPoolExecutor(count, name)
    meeting = threading.Barrier(count)  # none of them ends its first work before all have begun
    for done in [pool.submit(meeting.wait, _START_S) for _ in range(count)]:
        done.result()
    return pool
