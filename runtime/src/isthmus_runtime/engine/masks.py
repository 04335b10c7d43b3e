"""Masks of structured output, computed beside the forward pass: two threads for all rows of an engine.

The engine thread asks for a mask as soon as it has seen the token before it. The row is in a step by then, planned with
all others, and the executor waits for the mask when it is about to draw (ADR 35). A grammar that is slow delays the
others by the executor's patience now and then: a row that missed a draw is planned after its masks for a while.

A grammar is a client's, and one of forty bytes may take a tenth of a second for each mask. A request whose mask has
been slow goes on on the second thread, where requests share the time evenly; one that takes far too much ends.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import EngineFailed, InvalidRequest, RequestError
from ..interfaces.steps import Constraint, Forced, LateMask, Later, Masks

log = logging.getLogger(__name__)

_PATIENCE_S = 0.005
"""Rows whose masks are ready wait this long for those of others, so that they run in one step."""
_SEEN_S = 60.0
"""Longest wait for a token that an earlier step draws. Only a stopped engine thread exceeds it."""


SLOW_S = 0.02
"""Processor time of a mask after which its request has no more masks among the quick ones."""
BUDGET_S, BUDGET_OF_A_TOKEN_S = 5.0, 0.03
"""Processor time that the masks of one request may take: at once, and more for each token."""


@dataclass(slots=True, eq=False)
class _Work:
    """What the masks of one request have taken. turn: seconds on the clock of the slow ones' shares."""

    constraint: Constraint
    lock: threading.Lock = field(default_factory=threading.Lock)
    used_s: float = 0.0
    slow: bool = False
    turn: float = 0.0

    def answer(self, job: _Job, clock: Callable[[], float]) -> bytes | None:
        """The mask of `job`, which also gets what is forced. Raises RequestError."""
        assert job.generated is not None
        began = clock()
        try:
            answer = self.constraint.allowed(job.generated)
            job.forced = self.constraint.forced(job.generated, job.most)
        finally:
            took = clock() - began
            self.used_s += took
            self.turn += took
            self.slow = self.slow or took > SLOW_S
        if self.used_s > BUDGET_S + BUDGET_OF_A_TOKEN_S * job.count:
            raise InvalidRequest(
                f"structure: what may follow took {self.used_s:.1f} s to work out for {job.count} tokens; simplify the "
                "grammar",
                param="structure",
            )
        return answer


class _Job:
    """One mask: asked for, then answered once. `LateMask` for the executor."""

    __slots__ = ("_changed", "answer", "answered", "count", "forced", "generated", "most", "work")

    def __init__(self, work: _Work, count: int, changed: threading.Condition) -> None:
        self.work = work
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


class _Lane:
    """One thread and what waits for it. `even`: the next is of the request that has had least of its time."""

    def __init__(self, name: str, wake: Callable[[], None], clock: Callable[[], float], *, even: bool) -> None:
        self._wake = wake
        self._clock = clock
        self._even = even
        self._jobs: queue.PriorityQueue[tuple[float, int, _Job | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._turn = 0.0
        """Of the latest job: who comes new begins here, and waits no longer for those who have had more."""
        self.answered = 0
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def put(self, job: _Job | None) -> None:
        """Ask for a mask; None: end."""
        turn = -1.0
        if job is not None and self._even:
            turn = job.work.turn = max(job.work.turn, self._turn)
        self._jobs.put((turn if job is not None else -2.0, next(self._numbers), job))

    def _run(self) -> None:
        unsaid, since = False, 0.0
        while True:
            try:
                turn, _, job = self._jobs.get_nowait() if unsaid else self._jobs.get()
            except queue.Empty:
                self._wake()
                unsaid = False
                continue
            if job is None:
                return
            self._turn = turn
            try:
                with job.work.lock:  # a request that has become slow may have one more here
                    answer: bytes | RequestError | None = job.work.answer(job, self._clock)
            except RequestError as error:
                answer = error
            except BaseException as error:  # one request ends, the thread goes on; Rust's panics are no Exception
                log.exception("a mask of structured output failed")
                answer = EngineFailed(f"structured output failed: {error}")
            job.finish(answer)
            self.answered += 1
            if not unsaid:
                unsaid, since = True, time.monotonic()
            elif time.monotonic() - since > _PATIENCE_S:
                self._wake()
                unsaid = False


class MaskThread:
    """Computes masks: of quick grammars in the order they were asked for, of slow ones in even shares."""

    def __init__(self, wake: Callable[[], None], clock: Callable[[], float] = time.thread_time) -> None:
        """`wake` is called, on these threads, when masks that were asked for are ready. `clock`: what the calling
        thread has used of a processor, in seconds."""
        self._quick = _Lane("masks", wake, clock, even=False)
        self._slow = _Lane("slow-masks", wake, clock, even=True)
        self._changed = threading.Condition()
        self._asked = 0

    def start(self) -> None:
        """Start the threads."""
        for lane in (self._quick, self._slow):
            lane.thread.start()

    def stop(self, timeout_s: float) -> None:
        """End each thread after the mask that it computes."""
        ends_at = time.monotonic() + timeout_s
        for lane in (self._quick, self._slow):
            lane.put(None)
        for lane in (self._quick, self._slow):
            if lane.thread.ident is not None:
                lane.thread.join(max(0.0, ends_at - time.monotonic()))

    def beside(self, constraint: Constraint) -> Masks:
        """The masks of `constraint`, computed on these threads."""
        return _Beside(_Work(constraint), self._ask, self._changed)

    @property
    def busy(self) -> bool:
        """Whether they have not answered everything. For the thread that asks."""
        return self._asked != self._quick.answered + self._slow.answered

    def _ask(self, job: _Job) -> None:
        self._asked += 1
        (self._slow if job.work.slow else self._quick).put(job)


class _Beside:
    """One request's masks: asks another thread, and says `Later` meanwhile."""

    def __init__(self, work: _Work, submit: Callable[[_Job], None], changed: threading.Condition) -> None:
        self._work = work
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
        return _Job(self._work, count, self._changed)
