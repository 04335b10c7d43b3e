"""Masks of structured output, computed beside the forward pass: a thread of its own, one for all rows of an engine.

The engine thread asks for a mask when it plans, and goes on without the row when there is none yet. A row whose
grammar is slow delays other constrained rows by at most what llguidance lets one mask cost, and the others not at all.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import EngineFailed, RequestError
from ..interfaces.steps import Constraint, Later

log = logging.getLogger(__name__)

_PATIENCE_S = 0.005
"""Rows whose masks are ready wait this long for those of others, so that they run in one step."""


@dataclass(slots=True)
class _Job:
    """One mask: asked for, then answered once."""

    constraint: Constraint
    generated: tuple[int, ...]
    answer: bytes | RequestError | Later | None = Later.MASK


class MaskThread:
    """Computes masks in the order they were asked for."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on this thread, when masks that were asked for are ready."""
        self._wake = wake
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="masks", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread after the mask that it computes."""
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def beside(self, constraint: Constraint) -> Constraint:
        """`constraint`, whose masks are computed on this thread."""
        return _Beside(constraint, self._jobs.put)

    def _run(self) -> None:
        unsaid, since = False, 0.0
        while True:
            try:
                job = self._jobs.get_nowait() if unsaid else self._jobs.get()
            except queue.Empty:
                self._wake()
                unsaid = False
                continue
            if job is None:
                return
            try:
                job.answer = job.constraint.allowed(job.generated)
            except RequestError as error:
                job.answer = error
            except BaseException as error:  # one request ends, the thread goes on; Rust's panics are no Exception
                log.exception("a mask of structured output failed")
                job.answer = EngineFailed(f"structured output failed: {error}")
            if not unsaid:
                unsaid, since = True, time.monotonic()
            elif time.monotonic() - since > _PATIENCE_S:
                self._wake()
                unsaid = False


class _Beside:
    """Asks another thread, and says `Later` meanwhile."""

    def __init__(self, constraint: Constraint, submit: Callable[[_Job], None]) -> None:
        self._constraint = constraint
        self._submit = submit
        self._job: _Job | None = None

    def allowed(self, generated: Sequence[int]) -> bytes | Later | None:
        job = self._job
        if job is None or len(job.generated) != len(generated):
            job = self._job = _Job(self._constraint, tuple(generated))
            self._submit(job)
        if isinstance(job.answer, RequestError):
            raise job.answer
        return job.answer
