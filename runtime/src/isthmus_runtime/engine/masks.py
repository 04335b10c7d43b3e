"""Masks of structured output, computed beside the forward pass: a thread of its own, one for all rows of an engine.

The engine thread asks for a mask as soon as it has seen the token before it. The row is in a step by then, planned with
all others, and the executor waits for the mask when it is about to draw (ADR 35). A grammar that is slow delays the
others by the executor's patience now and then: a row that missed a draw is planned after its masks for a while.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from ..errors import EngineFailed, RequestError
from ..interfaces.steps import Constraint, Forced, LateMask, Later, Masks

log = logging.getLogger(__name__)

_PATIENCE_S = 0.005
"""Rows whose masks are ready wait this long for those of others, so that they run in one step."""
_SEEN_S = 60.0
"""Longest wait for a token that an earlier step draws. Only a stopped engine thread exceeds it."""


class _Job:
    """One mask: asked for, then answered once. `LateMask` for the executor."""

    __slots__ = ("_changed", "answer", "answered", "constraint", "count", "forced", "generated", "most")

    def __init__(self, constraint: Constraint, count: int, changed: threading.Condition) -> None:
        self.constraint = constraint
        self.count = count
        self.generated: tuple[int, ...] | None = None
        """None: not all tokens were seen."""
        self.answer: bytes | RequestError | None = None
        self.answered = False
        self.most = 0
        """Forced tokens to look for."""
        self.forced = Forced()
        self._changed = changed

    def finish(self, answer: bytes | RequestError | None) -> None:
        with self._changed:
            self.answer, self.answered = answer, True
            self._changed.notify_all()

    def seen(self, generated: tuple[int, ...], most: int) -> None:
        with self._changed:
            self.generated, self.most = generated, most
            self._changed.notify_all()

    def wait(self, patience_s: float) -> bytes | Later | None:
        if not self.answered:
            with self._changed:
                self._changed.wait_for(lambda: self.answered or self.generated is not None, _SEEN_S)
                self._changed.wait_for(lambda: self.answered, patience_s)
        # An error ends the request, which is for the scheduler to do: to the step it is a mask that did not come.
        return Later.MASK if not self.answered or isinstance(self.answer, RequestError) else self.answer


class MaskThread:
    """Computes masks in the order they were asked for."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on this thread, when masks that were asked for are ready."""
        self._wake = wake
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._asked = self._answered = 0
        self._thread = threading.Thread(target=self._run, name="masks", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread after the mask that it computes."""
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def beside(self, constraint: Constraint) -> Masks:
        """The masks of `constraint`, computed on this thread."""
        return _Beside(constraint, self._ask, self._changed)

    @property
    def busy(self) -> bool:
        """Whether it has not answered everything. For the thread that asks."""
        return self._asked != self._answered

    def _ask(self, job: _Job) -> None:
        self._asked += 1
        self._jobs.put(job)

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
            assert job.generated is not None
            try:
                answer: bytes | RequestError | None = job.constraint.allowed(job.generated)
                job.forced = job.constraint.forced(job.generated, job.most)
            except RequestError as error:
                answer = error
            except BaseException as error:  # one request ends, the thread goes on; Rust's panics are no Exception
                log.exception("a mask of structured output failed")
                answer = EngineFailed(f"structured output failed: {error}")
            job.finish(answer)
            self._answered += 1
            if not unsaid:
                unsaid, since = True, time.monotonic()
            elif time.monotonic() - since > _PATIENCE_S:
                self._wake()
                unsaid = False


class _Beside:
    """One request's masks: asks another thread, and says `Later` meanwhile."""

    def __init__(self, constraint: Constraint, submit: Callable[[_Job], None], changed: threading.Condition) -> None:
        self._constraint = constraint
        self._submit = submit
        self._changed = changed
        self._job: _Job | None = None
        self._late: _Job | None = None

    def allowed(self, generated: Sequence[int], most: int = 0) -> bytes | Later | None:
        count = len(generated)
        job = self._job
        if job is None or job.count != count:
            late = self._late
            if late is not None and late.count == count:
                job, self._late = late, None
            else:
                job = self._new(count)
            self._job = job
            job.seen(tuple(generated), most)
            self._submit(job)
        if not job.answered:
            return Later.MASK
        if isinstance(job.answer, RequestError):
            raise job.answer
        return job.answer

    def forced(self) -> Forced:
        job = self._job
        return job.forced if job is not None and job.answered else Forced()

    def late(self, count: int) -> LateMask:
        if self._job is not None and self._job.count == count:
            return self._job
        late = self._late = self._new(count)
        return late

    def drop(self) -> None:
        if self._late is not None:
            self._late.finish(None)
            self._late = None

    def _new(self, count: int) -> _Job:
        return _Job(self._constraint, count, self._changed)
