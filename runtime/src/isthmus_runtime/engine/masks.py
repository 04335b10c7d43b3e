"""Masks of structured output, computed beside the forward pass: a thread of its own, one for all rows of an engine.

The engine thread asks for a mask as soon as it has seen the token before it. The row is in a step by then, planned with
all others, and the executor waits for the mask when it is about to draw (ADR 35). A grammar that is slow delays the
others by the executor's patience now and then: a row that missed a draw is planned after its masks for a while.

Whose masks took least until now is served first, so that costly grammars wait for cheap ones and not the other way
round; and a request may use no more than a bounded time, which ends those that never would. A constraint is renewed on
another thread meanwhile: a large grammar takes seconds to compile.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from ..errors import EngineFailed, InvalidRequest, RequestError
from ..interfaces.steps import Constraint, Forced, LateMask, Later, Masks, Outgrown

log = logging.getLogger(__name__)

_PATIENCE_S = 0.005
"""Rows whose masks are ready wait this long for those of others, so that they run in one step."""
_SEEN_S = 60.0
"""Longest wait for a token that an earlier step draws. Only a stopped engine thread exceeds it."""
MOST_MASKS_S, MOST_OF_A_TOKEN_S = 10.0, 0.002
"""Processor time that one request's masks may take: at once, and more for each token, where 14 microseconds are usual
and a pattern with counted repeats takes 350 (ADR 29, 35)."""


_R = TypeVar("_R")


class _Counted:
    """A request's constraint, and the processor time that its masks have taken. Only the thread that has the request's
    job counts it: a request has one at a time whose tokens were seen."""

    __slots__ = ("constraint", "used_s")

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        self.used_s = 0.0

    def answer(self, job: _Job) -> bytes | RequestError | Outgrown | None:
        """The mask of `job`, or why there is none. Finds its forced tokens too."""
        most_s = MOST_MASKS_S + MOST_OF_A_TOKEN_S * job.count
        if self.used_s > most_s:
            return InvalidRequest(
                f"structure: structured output ended after {job.count} tokens: its masks have taken "
                f"{self.used_s:.1f} s of computing, at most {most_s:g} are allowed; simplify the grammar",
                param="structure",
            )
        generated = job.generated
        assert generated is not None

        def masked() -> bytes | None:
            answer = self.constraint.allowed(generated)
            job.forced = self.constraint.forced(generated, job.most)
            return answer

        try:
            return self._counted(masked)
        except Outgrown as outgrown:
            return outgrown.with_traceback(None)

    def renewed(self, outgrown: Outgrown) -> RequestError | None:
        """Renew the constraint; the error that ends the request where that cannot be."""
        return self._counted(outgrown.renew)

    def _counted(self, work: Callable[[], _R]) -> _R | RequestError:
        """What `work` returns, or the error that ends the request. Raises Outgrown."""
        began, apart = time.thread_time(), self.constraint.apart_s
        try:
            return work()
        except Outgrown:
            raise
        except RequestError as error:
            # Its traceback holds this frame, and with it the job that will hold the error: a cycle with a lexer in it.
            return error.with_traceback(None)
        except BaseException as error:  # one request ends, the thread goes on; Rust's panics are no Exception
            log.exception("a mask of structured output failed")
            return EngineFailed(f"structured output failed: {error}")
        finally:
            self.used_s += time.thread_time() - began + self.constraint.apart_s - apart


class _Job:
    """One mask: asked for, then answered once. `LateMask` for the executor."""

    __slots__ = ("_changed", "answer", "answered", "count", "failed", "forced", "generated", "most", "request")

    def __init__(self, request: _Counted, count: int, changed: threading.Condition) -> None:
        self.request = request
        self.count = count
        self.generated: tuple[int, ...] | None = None
        """None: not all tokens were seen."""
        self.answer: bytes | RequestError | None = None
        self.answered = False
        self.failed: RequestError | None = None
        """Why its constraint could not be renewed."""
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


class _Queue(Generic[_R]):
    """What requests ask for, of the request that has used least first."""

    def __init__(self) -> None:
        self._asked: list[tuple[float, int, _Job, _R]] = []
        """A heap: seconds used by the request when it asked, how many had asked before, what it asks."""
        self._count = 0
        self._changed = threading.Condition()
        self._ending = False

    def put(self, job: _Job, what: _R) -> None:
        with self._changed:
            self._count += 1
            heapq.heappush(self._asked, (job.request.used_s, self._count, job, what))
            self._changed.notify()

    def next(self, wait: bool) -> tuple[_Job, _R] | None:
        """The next one; None when it is to end or, without `wait`, when there is none."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._asked or self._ending)
            return None if self._ending or not self._asked else heapq.heappop(self._asked)[2:]

    def end(self) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify()


class MaskThread:
    """Computes masks, of the request that has used least first."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called, on this thread, when masks that were asked for are ready."""
        self._wake = wake
        self._jobs = _Queue[None]()
        self._outgrown = _Queue[Outgrown]()
        self._ending = False
        self._changed = threading.Condition()
        self._asked = self._answered = 0
        self._threads = (
            threading.Thread(target=self._run, name="masks", daemon=True),
            threading.Thread(target=self._renew, name="masks-anew", daemon=True),
        )

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the threads after the mask, and the constraint, that they are at."""
        self._ending = True
        self._jobs.end()
        self._outgrown.end()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout_s)

    def beside(self, constraint: Constraint) -> Masks:
        """The masks of `constraint`, computed on this thread."""
        return _Beside(constraint, self._ask, self._changed)

    def lost(self, masks: Masks | None) -> RequestError | None:
        """Why these of `beside` will allow nothing any more, whether or not they are asked; None: they may."""
        return masks.constraint.lost() if isinstance(masks, _Beside) else None

    @property
    def busy(self) -> bool:
        """Whether it has not answered everything. For the thread that asks."""
        return self._asked != self._answered

    def _ask(self, job: _Job) -> None:
        self._asked += 1
        self._jobs.put(job, None)

    def _run(self) -> None:
        unsaid, since = False, 0.0
        while True:
            found = self._jobs.next(wait=not unsaid)
            if found is None:
                if self._ending:
                    return
                self._wake()
                unsaid = False
                continue
            job = found[0]
            answer = job.failed or job.request.answer(job)
            if isinstance(answer, Outgrown):
                self._outgrown.put(job, answer)
                del found, job, answer
                continue
            job.finish(answer)
            del found, job, answer  # what they hold is large, and the next one may be long in coming
            self._answered += 1
            if not unsaid:
                unsaid, since = True, time.monotonic()
            elif time.monotonic() - since > _PATIENCE_S:
                self._wake()
                unsaid = False

    def _renew(self) -> None:
        while (found := self._outgrown.next(wait=True)) is not None:
            job, outgrown = found
            job.failed = job.request.renewed(outgrown)
            self._jobs.put(job, None)
            del found, job, outgrown


class _Beside:
    """One request's masks: asks another thread, and says `Later` meanwhile."""

    def __init__(self, constraint: Constraint, submit: Callable[[_Job], None], changed: threading.Condition) -> None:
        self.constraint = constraint
        self._request = _Counted(constraint)
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
        answer = job.answer
        if not isinstance(answer, RequestError):
            return answer
        self._job = job = None  # or the error would hold this frame, and be held by it
        try:
            raise answer
        finally:
            del answer

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
        return _Job(self._request, count, self._changed)
