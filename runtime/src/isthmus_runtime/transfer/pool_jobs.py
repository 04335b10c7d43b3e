"""Work that calls into the storage pool, in threads of its own.

Calls into a master that died block for seconds: a watch thread gives up the jobs that are in one. A call that was given
up may still read or write the KV pool: its attempt is not drained before the call returns.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from ..interfaces.transport import Done, TransferResult
from ..threads import guarded
from .bounded import connect_problem
from .slots import RecordSlots

STALL_S = 0.3
"""A call that takes longer makes the watch look whether the master still answers."""
CONNECT_S = 0.25
FRESH_S = 0.25
"""The master is not asked again within this time of an answer."""
JOIN_S = 1.0
"""For a thread to end: one may sit in a call that does not."""


class Broken(Exception):
    """Ends a job with a reason."""


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """Some work for an attempt; `done` is told its result, once."""

    attempt: str
    work: Callable[[Job], TransferResult]
    done: Done
    timeout_s: float
    deadline: float
    look_at: float
    """When the watch looks whether the master is the reason that this takes so long."""
    started: bool = False
    cancelled: bool = False
    reported: bool = False
    slot: int | None = None
    """Address of its record's slot."""
    seals: list[int] = field(default_factory=list)
    """Places for seals, of the thread that works on it."""


class Master:
    """Whether mooncake_master at `address` is there. Any thread."""

    def __init__(self, address: str, clock: Callable[[], float]) -> None:
        self._address = address
        self._clock = clock
        self._answered = float("-inf")

    def problem(self) -> str:
        """Empty when it accepted a connection just now or a moment ago."""
        if self._clock() - self._answered < FRESH_S:
            return ""
        problem = connect_problem(self._address, CONNECT_S)
        if problem:
            return f"mooncake_master at {self._address} does not answer: {problem}"
        self._answered = self._clock()
        return ""

    def doubt(self) -> None:
        """A call did not reach it."""
        self._answered = float("-inf")


class PoolJobs:
    """Jobs, and the threads that work on them. Its methods may be called from any thread."""

    def __init__(self, master: Master, clock: Callable[[], float]) -> None:
        self.slots = RecordSlots()
        """For jobs with a record. Not to be taken from by others."""
        self._master = master
        self._clock = clock
        self._wake = threading.Condition()
        self._closing = threading.Event()
        self._queue: deque[Job] = deque()
        self._jobs: list[Job] = []
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        """A heap: when each is due, and which was asked for first."""
        self._order = count()
        self._threads: list[threading.Thread] = []

    @property
    def closing(self) -> bool:
        """Whether no job begins any more."""
        return self._closing.is_set()

    def start(self, seals: Sequence[list[int]]) -> None:
        """Begin, with a thread for each of `seals`: places in registered memory."""
        threads = [threading.Thread(target=self._work, args=(own,), daemon=True) for own in seals]
        self._threads = [*threads, threading.Thread(target=self._watch, daemon=True)]
        for thread in self._threads:
            thread.name = "transfer-store"
            thread.start()

    def submit(
        self,
        attempt: str,
        work: Callable[[Job], TransferResult],
        timeout_s: float,
        done: Done,
        *,
        with_slot: bool,
    ) -> None:
        """Have a thread do `work`. Raises Overloaded when there is no slot."""
        now = self._clock()
        job = Job(
            attempt=attempt,
            work=work,
            done=done,
            timeout_s=timeout_s,
            deadline=now + timeout_s,
            look_at=now + STALL_S,
        )
        with self._wake:
            if with_slot:
                job.slot = self.slots.take()
            self._jobs.append(job)
            self._queue.append(job)
            self._wake.notify_all()

    def cancel(self, attempt: str) -> None:
        """The attempt's jobs make no further call."""
        with self._wake:
            for job in self._jobs:
                if job.attempt == attempt:
                    job.cancelled = True
            self._wake.notify_all()

    def moving(self, attempt: str) -> bool:
        """Whether a job of the attempt has not ended, which one that was given up has not."""
        with self._wake:
            return any(job.attempt == attempt for job in self._jobs)

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Have the watch call `call`, which must not block, `delay_s` from now."""
        with self._wake:
            heapq.heappush(self._later, (self._clock() + delay_s, next(self._order), call))
            self._wake.notify_all()

    def pause(self, seconds: float) -> None:
        """Within a job: wait, but not for longer than until the end."""
        self._closing.wait(seconds)

    def close(self, timeout_s: float) -> bool:
        """Begin nothing more. False: a thread is still in a call."""
        ends_at = time.monotonic() + timeout_s
        self._closing.set()
        with self._wake:
            self._wake.notify_all()
        for thread in self._threads:
            thread.join(min(JOIN_S, max(0.0, ends_at - time.monotonic())))
        return not any(thread.is_alive() for thread in self._threads)

    # ---------------------------------------------------------------------------------------------------- the threads

    def _work(self, seals: list[int]) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closing.is_set():
                    self._wake.wait()
                if self._closing.is_set():
                    return
                job = self._queue.popleft()
                job.started = True
                job.seals = seals
                job.look_at = self._clock() + STALL_S
                skip = job.cancelled or job.reported
            result = self._run(job, skip)
            with self._wake:
                self._jobs.remove(job)
                if job.slot is not None:
                    self.slots.give(job.slot)
            self._report(job, result)

    def _run(self, job: Job, skip: bool) -> TransferResult:
        try:
            if skip:
                raise Broken("cancelled")
            if problem := self._master.problem():
                raise Broken(problem)
            return job.work(job)
        except Broken as error:
            return TransferResult(ok=False, moved_bytes=0, reason=str(error))
        except Exception as error:
            return TransferResult(ok=False, moved_bytes=0, reason=f"unexpected: {error!r}")

    def _report(self, job: Job, result: TransferResult) -> None:
        with self._wake:
            if job.reported:
                return
            job.reported = True
        guarded(job.done, result)

    def _watch(self) -> None:
        """Gives up jobs that are late or stuck in a call to a dead master, and calls what is due."""
        while True:
            with self._wake:
                if self._closing.is_set():
                    return
                open_jobs = [job for job in self._jobs if not job.reported]
                ends = [min(job.deadline, job.look_at) for job in open_jobs]
                due = min(ends + [at for at, _, _ in self._later[:1]], default=None)
                if due is None or due > self._clock():
                    self._wake.wait(None if due is None else due - self._clock())
                    continue
                calls: list[Callable[[], None]] = []
                while self._later and self._later[0][0] <= self._clock():
                    calls.append(heapq.heappop(self._later)[2])
            for call in calls:
                guarded(call)
            now = self._clock()
            late = [job for job in open_jobs if now >= job.deadline]
            slow = [job for job in open_jobs if job not in late and now >= job.look_at]
            problem = self._master.problem() if slow else ""
            for job in slow:
                job.look_at = self._clock() + STALL_S
                if problem:
                    self._give_up(job, problem)
            for job in late:
                self._give_up(job, f"the pool did not answer within {job.timeout_s:.3g} s")

    def _give_up(self, job: Job, reason: str) -> None:
        with self._wake:
            job.cancelled = True
            # A job still in the queue has not touched anything and never will.
            running = job.started
        self._report(job, TransferResult(ok=False, moved_bytes=0, reason=reason, settled=not running))
