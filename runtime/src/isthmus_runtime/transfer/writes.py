"""The writes in flight through TransferEngine. One thread owns them all.

It submits each run of adjacent blocks as a transfer of its own and reads its status until that is final: a batch call
would report the first failure while the rest of the batch still moves, and would free a batch that timed out. So an
operation that ends here has truly ended, and one that does not end in time is reported as unsettled and watched until
it does. The thread looks every POLL_S while something moves, more often at what is short, and sleeps on a condition
otherwise. Between GPUs of one host many runs are one copy, which ends when its events have been reached.

A write is complete when the receiver has stored it (acknowledged framing, MC_TCP_PROTO 2), so the record, submitted
after everything else completed, is really last.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from ..interfaces.transport import Done, TransferResult
from ..threads import guarded
from .bounded import TookTooLong, run_bounded, split_address
from .handshakes import Handshakes, started
from .native_engine import POLL_S
from .peer_memory import IDLE_S, Batch, Copy, PeerMemory, StillMoving
from .peers import Peer, Peers
from .sockets import stuck_bytes_to
from .transport import DONE, FAILED, Run

_log = logging.getLogger(__name__)

WINDOW = 64
"""Runs in flight per operation: what a cancelled operation still has to wait for."""
SOON_POLL_S = 0.0001
"""Pace of looking, for `SOON_S`, at what takes less than a poll: records, and copies between GPUs. Two of them stand
between a prompt's last step and its first token."""
SOON_S = 0.003
IDLE_POLL_S = 0.01
"""Pace of looking at transfers that have not moved for BUSY_S."""
BUSY_S = 0.1


@dataclass(slots=True, kw_only=True, eq=False)
class Write:
    """An operation: runs in any order, then the record."""

    attempt: str
    peer: Peer
    claim: bytes
    """What the peer is shown of its ticket."""
    runs: deque[Run | Batch]
    """Still to be submitted."""
    record: Run | None
    done: Done
    over: Callable[[], None]
    """Called when nothing of it moves any more, which may be long after `done`."""
    timeout_s: float
    deadline: float
    mapping: str = ""
    """Over NVLink: the peer's offer of its pool (`PeerMemory`)."""
    base: int = 0
    """And where the pool is in the peer's process."""
    record_due: bool = field(init=False)
    """The record is still to be submitted."""
    asking: bool = False
    """Whether the peer is being asked for its epoch."""
    flying: dict[int | Copy, Run | Batch] = field(default_factory=dict)
    moved: int = 0
    problem: str = ""
    reported: bool = False
    broken: bool = False
    """A write of it failed: its bytes may be in the kernel's buffers."""
    lost: bool = False
    """Nobody knows any more what it does: it counts as moving for good."""

    def __post_init__(self) -> None:
        self.record_due = self.record is not None

    @property
    def waiting(self) -> bool:
        """Whether something of it is still to be submitted."""
        return bool(self.runs) or self.record_due

    @property
    def soon(self) -> bool:
        """Whether what is in flight takes a fraction of a millisecond."""
        return all(isinstance(run, Batch) or run is self.record for run in self.flying.values())

    def stop(self, problem: str) -> None:
        """Submit nothing more of it; what is in flight is watched until it ends. The first problem counts."""
        self.runs.clear()
        self.record_due = False
        self.problem = self.problem or problem

    def pop(self) -> Run | Batch | None:
        """What may be submitted next; None: nothing yet, or nothing more."""
        if self.runs:
            return self.runs.popleft()
        if self.record_due and not self.flying:
            self.record_due = False
            return self.record
        return None


class Writes:
    """Owner of every operation until it has truly ended. Its methods may be called from any thread."""

    def __init__(self, peers: Peers, clock: Callable[[], float]) -> None:
        self._peers = peers
        self._clock = clock
        self._wake = threading.Condition()
        self._closing = False
        self._new: list[Write] = []
        self._ops: list[Write] = []
        self._calls: list[Callable[[], None]] = []
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        """A heap: when each is due, and which was asked for first."""
        self._order = count()
        self._broken: dict[str, str] = {}
        """Peer's host, per attempt that had a failed write."""
        self._handshakes = Handshakes(clock)
        self._thread = threading.Thread(target=self._run, name="transfer-direct", daemon=True)
        self._engine: Any = None
        self._memory: PeerMemory | None = None
        self._tidying = False
        self._moved_at = 0.0

    def start(self, engine: Any, memory: PeerMemory | None = None) -> None:
        """Begin, through a `mooncake.engine.TransferEngine`; with `memory`, blocks go by that."""
        self._engine, self._memory = engine, memory
        self._thread.start()

    def go_on_with(self, engine: Any) -> None:
        """Submit through another engine from now on, when nothing is in flight through the one before: which ends with
        the last that refers to it, so it is in no closure that refers to itself."""
        self.call(partial(self._change_to, engine))

    def _change_to(self, engine: Any) -> None:
        if any(op.flying or op.lost for op in self._ops):
            self.call(partial(self._change_to, engine), BUSY_S)
        else:
            self._engine = engine

    def submit(self, op: Write) -> None:
        """Begin an operation; its `done` is called on the thread."""
        self._peers.expect(op.attempt)
        with self._wake:
            self._new.append(op)
            self._wake.notify()

    def cancel(self, attempt: str) -> None:
        """Submit nothing more of the attempt."""
        with self._wake:
            for op in (*self._ops, *self._new):
                if op.attempt == attempt:
                    op.stop("cancelled")
        self.call(lambda: None)

    def moving(self, attempt: str) -> bool:
        """Whether a byte of the attempt may still leave: an operation, or what the kernel has of a failed one."""
        with self._wake:
            if any(op.attempt == attempt for op in (*self._ops, *self._new)):
                return True
            host = self._broken.get(attempt)
        return host is not None and bool(stuck_bytes_to(host))

    def forget(self, attempt: str) -> None:
        """The attempt is over and drained."""
        with self._wake:
            self._broken.pop(attempt, None)

    def call(self, work: Callable[[], None], delay_s: float = 0.0) -> None:
        """Have the thread call `work`, `delay_s` from now, and look at every operation. A notification alone would be
        lost while it is busy, and it might then sleep until the next deadline."""
        with self._wake:
            if delay_s:
                heapq.heappush(self._later, (self._clock() + delay_s, next(self._order), work))
            else:
                self._calls.append(work)
            self._wake.notify()

    def close(self, timeout_s: float) -> bool:
        """Submit nothing more, and stop when what is in flight has ended. False: it has not within `timeout_s`, and may
        still read this process's memory."""
        ends_at = time.monotonic() + timeout_s
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        try:
            run_bounded(self._handshakes.close, max(0.0, ends_at - time.monotonic()), "transfer-close")
        except TookTooLong:
            return False
        if self._thread.is_alive() or any(op.flying or op.lost for op in self._ops):
            return False
        self._engine = None
        return True

    # ----------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while True:
            with self._wake:
                if not (self._calls or self._new or self._closing):
                    self._wake.wait(self._pause())
                if self._closing:
                    break
                calls, self._calls = self._calls, []
                while self._later and self._later[0][0] <= self._clock():
                    calls.append(heapq.heappop(self._later)[2])
                self._ops.extend(self._new)
                self._new.clear()
            for call in calls:
                guarded(call)
            for op in tuple(self._ops):
                try:
                    self._advance(op)
                except Exception as error:  # of one operation: this thread has those of all peers
                    self._lose(op, error)
        self._see_off()

    def _see_off(self) -> None:
        """Look at what is in flight until it has ended: it reads memory that this process is about to give back."""
        while moving := [op for op in self._ops if op.flying and not op.lost]:
            for op in moving:
                try:
                    self._look(op)
                except Exception as error:
                    self._lose(op, error)
            with self._wake:
                self._wake.wait(POLL_S)

    def _pause(self) -> float | None:
        moving = [op for op in self._ops if op.flying and not op.lost]
        if moving:
            still = self._clock() - self._moved_at
            if still < SOON_S and all(op.soon for op in moving):
                return SOON_POLL_S
            return POLL_S if still < BUSY_S else IDLE_POLL_S
        ends = [op.deadline for op in self._ops if not op.reported]
        due = min(ends + [at for at, _, _ in self._later[:1]], default=None)
        return None if due is None else max(0.0, due - self._clock())

    def _look(self, op: Write) -> None:
        """See what of it has ended."""
        for transfer, run in tuple(op.flying.items()):
            status = transfer.status() if isinstance(transfer, Copy) else self._engine.transfer_check_status(transfer)
            if status == DONE:
                op.moved += 0 if run is op.record else run.nbytes
                self._moved_at = self._clock()
                del op.flying[transfer]
            elif status == FAILED:
                del op.flying[transfer]
                op.broken = True
                self._stop(op, f"write of {run.nbytes} bytes to {op.peer.session} failed")
                self._peers.doubt(op.peer)

    def _advance(self, op: Write) -> None:
        if op.lost:
            return
        self._look(op)
        if not op.asking:
            self._fly(op)
        if not (op.asking or op.flying or op.waiting):
            self._finish(op)
        elif not op.reported and self._clock() >= op.deadline:
            op.reported = True
            self._stop(op, f"{op.peer.session} did not take the bytes within {op.timeout_s:.3g} s")
            settled = not op.flying
            op.done(TransferResult(ok=False, moved_bytes=op.moved, reason=op.problem, settled=settled))

    def _fly(self, op: Write) -> None:
        """Submit as much as the window and the peer allow."""
        while len(op.flying) < WINDOW:
            with self._wake:
                if op.waiting and not self._peers.may_write(op.peer, op.attempt):
                    op.asking = True
                    self._peers.greet(op.peer, op.claim, op.attempt, partial(self._greeted, op))
                    return
                run = op.pop()
            if run is None:
                return
            session, problem = op.peer.session, ""
            transfer: int | Copy = 0
            try:
                transfer = self._submit(op, run)
            except StillMoving:
                raise
            except Exception as error:  # what one peer's ticket says ends its own transfer, and no other
                problem = f"cannot be written to: {error!r}"
            if isinstance(transfer, Copy) or started(transfer):
                op.flying[transfer] = run
                self._moved_at = self._clock()
            else:
                silent = self._handshakes.silent(session)
                problem = problem or ("does not answer a handshake" if silent else "refused the handshake")
                self._stop(op, f"{session} {problem}")

    def _submit(self, op: Write, run: Run | Batch) -> int | Copy:
        if isinstance(run, Run):
            session = op.peer.session
            write = partial(self._engine.transfer_submit_write, session, run.source, run.target, run.nbytes)
            return self._handshakes.submit(session, write)
        assert self._memory is not None, "blocks were batched without NVLink"
        if not self._tidying:
            self._tidying = True
            self.call(self._tidy, IDLE_S)
        return self._memory.submit(op.mapping, op.base, run)

    def _tidy(self) -> None:
        left = True
        try:
            left = self._memory is not None and self._memory.tidy()
        finally:
            self._tidying = left
            if left:
                self.call(self._tidy, IDLE_S)

    def _greeted(self, op: Write, problem: str) -> None:
        def checked() -> None:
            if problem:
                self._stop(op, problem)
            op.asking = False

        self.call(checked)

    def _stop(self, op: Write, problem: str) -> None:
        with self._wake:
            op.stop(problem)

    def _finish(self, op: Write) -> None:
        host = split_address(op.peer.session)[0] if op.broken else ""
        with self._wake:
            self._ops.remove(op)
            if host:
                self._broken[op.attempt] = host
        guarded(op.over)
        if not op.reported:
            op.reported = True
            settled = not host or not stuck_bytes_to(host)
            op.done(TransferResult(ok=not op.problem, moved_bytes=op.moved, reason=op.problem, settled=settled))

    def _lose(self, op: Write, error: Exception) -> None:
        _log.error("a write to %s is lost; what it writes to stays set aside", op.peer.session, exc_info=error)
        self._stop(op, f"internal error: {error!r}")
        op.lost = True
        if not op.reported:
            op.reported = True
            guarded(op.done, TransferResult(ok=False, moved_bytes=op.moved, reason=op.problem, settled=False))
