"""Pools of threads that run before they are needed, and work on threads whose failures are told."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

_log = logging.getLogger(__name__)
_START_S = 30.0


def processors(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """How many this process may use: those that it may run on, or as many as its control group's time is worth."""
    able = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # another version of control groups, or "max"
        quota, period = map(int, (groups / "cpu.max").read_text(encoding="ascii").split())
        able = min(able, max(1, -(-quota // period)))
    return able


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


def send(pool: ThreadPoolExecutor, work: Callable[..., object], *arguments: object) -> None:
    """Have the pool do work whose result nobody waits for. What it raises is logged."""
    pool.submit(work, *arguments).add_done_callback(_tell)


def _tell(done: Future[object]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        _log.error("work on a thread failed", exc_info=error)


def guarded(call: Callable[..., object], *arguments: object) -> None:
    """Call it. What it raises is logged: the thread that calls has others to serve."""
    try:
        call(*arguments)
    except Exception:
        _log.exception("a call on the thread %s failed", threading.current_thread().name)
