"""Store mode: prefill puts blocks into the Mooncake storage pool, decode fetches them. Neither knows the other.

Full blocks are named by their content and stay as a shared prefix cache. The incomplete last block (`:partial:`) and
the record belong to one attempt: hard-pinned, removed by decode when it has them or gives up, and swept by prefill
later in case decode could not. A full block is protected from eviction until decode reads it by a lease, taken with
`is_exist` before and after the put (docs/adr/0004): that also covers blocks that were in the pool before, and shows
whether a block was evicted between the two calls.

Calls into a master that died block for seconds, so they run in threads of their own and a watch thread gives them up. A
call that was given up may still read or write the KV pool: its attempt is not drained before the call returns.

Values go to the segment of whoever puts them as long as it has room (docs/adr/0009): a put then depends on nobody else.

The pool does not keep late bytes of a failed put out of memory that it has given to another key meanwhile
(docs/adr/0007), so every value is sealed, and what decode reads is checked against its seal (docs/adr/0021). A value
that is damaged in the pool is removed; no other failure removes what requests share.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ..config import apply_native_environment
from ..interfaces.handoff import ReceiveJob
from ..interfaces.transport import CLOSE_S, Done, KvRegion, Piece, TransferResult
from ..kv.keys import record_key
from ..protocol import Ticket
from .backend import Effective
from .bounded import TookTooLong, built_for_cpus, connect_problem, run_bounded
from .joining import StorePool, join_pool, leave_behind
from .pool_codes import NO_SPACE, OWNER_GONE, explain
from .pool_values import PoolValues, SealRoom
from .seal import SEAL_BYTES
from .slots import SLOT_BYTES, RecordSlots
from .transport import check_memory, transport_environment

log = logging.getLogger(__name__)

CALL_THREADS = 4
CHUNK_KEYS = 256
"""Keys per call: keeps a call well inside the pool's lease."""
STALL_S = 0.3
"""A call that takes longer makes the watch look whether the master still answers."""
CONNECT_S = 0.25
LAST_ASK_S = 2.0
"""A master that is stopped accepts connections, and answers nothing."""
FRESH_S = 0.25
"""The master is not asked again within this time of an answer."""
NO_SPACE_PAUSE_S = 0.2
PUT_TRIES = 3
"""A put that found no space, or the segment of a pod that is gone, is tried on: the pool chooses again."""
OTHERS_PUT_S = 0.5
"""How long a key that another process is putting may stay incomplete."""
OTHERS_PAUSE_S = 0.005
READ_TRIES = 2
"""A value that is damaged once may have left the pool during the read; one that is damaged twice is so in the pool."""
SWEEP_AFTER_S = 60.0
"""After its timeout, when prefill removes keys that decode should have removed."""


def is_scoped(key: str) -> bool:
    """Keys of one attempt; all others are shared by content."""
    return ":partial:" in key or key.startswith("record:")


class _Broken(Exception):
    """Ends an operation with a reason."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    attempt: str
    work: Callable[[_Job], TransferResult]
    done: Done
    timeout_s: float
    deadline: float
    look_at: float
    """When the watch looks whether the master is the reason that this takes so long."""
    started: bool = False
    cancelled: bool = False
    reported: bool = False
    slot: int | None = None
    seals: list[int] = field(default_factory=list)
    """Places for seals, of the thread that works on it."""


class StoreTransfer:
    """Implements `TransferBackend` over MooncakeDistributedStore. `host`: the address peers reach this process at.

    `secret`: of this service (`kv.keys.pool_secret`); processes with another one find nothing that this one stores, and
    cannot make a value that it takes. Empty: names and seals are open.
    """

    def __init__(
        self,
        *,
        host: str,
        master: str,
        segment_bytes: int,
        replicas: int = 1,
        secret: bytes = b"",
        timeout_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._master = master
        self._segment_bytes = segment_bytes
        self._replicas = replicas
        self._secret = secret
        self._timeout_s = timeout_s
        self._clock = clock
        self._wake = threading.Condition()
        self._closing = threading.Event()
        self._queue: deque[_Job] = deque()
        self._jobs: list[_Job] = []
        self._slots = RecordSlots()
        self._seals = SealRoom(CALL_THREADS, CHUNK_KEYS)
        self._scoped: dict[str, set[str]] = {}
        """Request-scoped keys to remove, per attempt."""
        self._written: dict[str, list[Piece]] = {}
        """Shared blocks put so far, per attempt that has no record yet."""
        self._sweep: list[tuple[float, str]] = []
        self._answered = float("-inf")
        self._threads: list[threading.Thread] = []
        self._pool: StorePool | None = None
        self._open_values: PoolValues | None = None

    @property
    def peer_writes(self) -> bool:
        return False

    @property
    def seals_blocks(self) -> bool:
        return True

    def effective(self) -> Effective:
        return Effective("tcp", 0.0 if self._pool is None else self._pool.gbps)

    # ------------------------------------------------------------------------------------------------------- start-up

    def prepare(self, region: KvRegion, timeout_s: float) -> None:
        """As in `KvTransfer`; also puts values into the pool and reads them back."""
        check_memory("store", region.device, built_for_cpus=built_for_cpus())
        apply_native_environment(transport_environment("tcp", self._timeout_s))
        regions = {
            "the KV pool": (region.base, region.num_blocks * region.block_stride),
            "records": (self._slots.base, self._slots.nbytes),
            "seals": (self._seals.base, self._seals.nbytes),
        }
        self._pool = join_pool(self._host, self._master, self._segment_bytes, regions, timeout_s, self._clock)
        self._open_values = PoolValues(
            self._pool, region, replicas=self._replicas, secret=self._secret, unreachable=self._doubt_master
        )
        bodies: list[Callable[[], None]] = [
            partial(self._work, self._seals.places(caller)) for caller in range(CALL_THREADS)
        ]
        bodies.append(self._watch)
        self._threads = [threading.Thread(target=body, name="transfer-store", daemon=True) for body in bodies]
        for thread in self._threads:
            thread.start()

    # -------------------------------------------------------------------------------------------------------- calls

    def reserve(self, job: ReceiveJob, layout_digest: str) -> Ticket:
        keys = {block.key for block in job.blocks if is_scoped(block.key)}
        with self._wake:
            self._scoped[job.attempt] = keys | {record_key("", job.attempt)}
        return Ticket(mode="store", attempt=job.attempt, layout_digest=layout_digest, skip_blocks=job.skip_blocks)

    def write(
        self,
        attempt: str,
        ticket: Ticket,
        pieces: Sequence[Piece],
        record: bytes | None,
        timeout_s: float,
        done: Done,
    ) -> None:
        if record is not None and len(record) > SLOT_BYTES - SEAL_BYTES:
            raise ValueError(f"record of {len(record)} bytes; the limit is {SLOT_BYTES - SEAL_BYTES}")
        moving = tuple(pieces)

        def work(job: _Job) -> TransferResult:
            moved = self._put(job, moving)
            if record is not None:
                self._put_record(job, record)
            return TransferResult(ok=True, moved_bytes=moved)

        self._submit(attempt, work, timeout_s, done, with_slot=record is not None)

    def read(self, attempt: str, pieces: Sequence[Piece], timeout_s: float, done: Done) -> None:
        moving = tuple(pieces)

        def work(job: _Job) -> TransferResult:
            assert job.slot is not None
            record, problem = self._values(job).get_record(record_key("", attempt), job.slot)
            if problem:
                raise _Broken(f"the record of attempt {attempt}: {problem}")
            return TransferResult(ok=True, moved_bytes=self._get(job, moving), record=record)

        self._submit(attempt, work, timeout_s, done, with_slot=True)

    def cancel(self, attempt: str) -> None:
        with self._wake:
            for job in self._jobs:
                if job.attempt == attempt:
                    job.cancelled = True
            self._wake.notify_all()

    def drained(self, attempt: str, peer_url: str, peer_epoch: str, done: Callable[[bool], None]) -> None:
        """Nobody writes into another's memory: only calls running here count."""
        with self._wake:
            moving = any(job.attempt == attempt for job in self._jobs)
        done(not moving)

    def expect(self, ticket: Ticket) -> None:
        """Nothing is needed of a peer."""

    def forget(self, attempt: str) -> None:
        """Decode removes the attempt's keys. Prefill's stay until decode did, and are swept later."""
        with self._wake:
            self._written.pop(attempt, None)
            keys = self._scoped.get(attempt)
            if keys is None or any(due for due, name in self._sweep if name == attempt):
                return
        self._remove(attempt)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        ends_at = time.monotonic() + timeout_s

        def left() -> float:
            return max(0.0, ends_at - time.monotonic())

        self._closing.set()
        with self._wake:
            self._wake.notify_all()
        for thread in self._threads:
            # One may sit in a call that does not end; it is a daemon.
            thread.join(min(1.0, left()))
        if self._pool is not None:
            store, probing = self._pool.store, not self._pool.probe_over.is_set()
            self._pool = self._open_values = None
            # Closing it under a call that still runs, as into a master that is stopped, ends the process by a signal.
            working = probing or any(thread.is_alive() for thread in self._threads)
            if working or connect_problem(self._master, CONNECT_S):
                leave_behind(store)
                return
            try:
                # Closing keeps the interpreter lock: nobody could give it up. This call does not.
                run_bounded(lambda: store.batch_is_exist(["closing"]), min(LAST_ASK_S, left()), "transfer-close")
            except TookTooLong:
                leave_behind(store)
                return
            store.close()

    # --------------------------------------------------------------------------------------------------------- threads

    def _submit(
        self,
        attempt: str,
        work: Callable[[_Job], TransferResult],
        timeout_s: float,
        done: Done,
        *,
        with_slot: bool,
    ) -> None:
        now = self._clock()
        job = _Job(
            attempt=attempt,
            work=work,
            done=done,
            timeout_s=timeout_s,
            deadline=now + timeout_s,
            look_at=now + STALL_S,
        )
        with self._wake:
            if with_slot:
                job.slot = self._slots.take()
            self._jobs.append(job)
            self._queue.append(job)
            self._wake.notify_all()

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
                    self._slots.give(job.slot)
            self._report(job, result)

    def _run(self, job: _Job, skip: bool) -> TransferResult:
        try:
            if skip:
                raise _Broken("cancelled")
            if problem := self._master_problem():
                raise _Broken(problem)
            return job.work(job)
        except _Broken as error:
            return TransferResult(ok=False, moved_bytes=0, reason=str(error))
        except Exception as error:
            return TransferResult(ok=False, moved_bytes=0, reason=f"unexpected: {error!r}")

    def _report(self, job: _Job, result: TransferResult) -> None:
        with self._wake:
            if job.reported:
                return
            job.reported = True
        job.done(result)

    def _watch(self) -> None:
        """Gives up operations that are late or stuck in a call to a dead master, and sweeps old keys."""
        while not self._closing.is_set():
            with self._wake:
                open_jobs = [job for job in self._jobs if not job.reported]
                due = min(
                    [min(job.deadline, job.look_at) for job in open_jobs] + [t for t, _ in self._sweep], default=None
                )
                if due is None or due > self._clock():
                    self._wake.wait(None if due is None else due - self._clock())
                    continue
                swept = [name for t, name in self._sweep if t <= self._clock()]
                self._sweep = [(t, name) for t, name in self._sweep if name not in swept]
            for name in swept:
                self._remove(name)
            now = self._clock()
            late = [job for job in open_jobs if now >= job.deadline]
            slow = [job for job in open_jobs if job not in late and now >= job.look_at]
            problem = self._master_problem() if slow else ""
            for job in slow:
                job.look_at = self._clock() + STALL_S
                if problem:
                    self._give_up(job, problem)
            for job in late:
                self._give_up(job, f"the pool did not answer within {job.timeout_s:.3g} s")

    def _give_up(self, job: _Job, reason: str) -> None:
        with self._wake:
            job.cancelled = True
            # A job still in the queue has not touched anything and never will.
            running = job.started
        self._report(job, TransferResult(ok=False, moved_bytes=0, reason=reason, settled=not running))

    def _master_problem(self) -> str:
        """Empty when the master accepted a connection just now or a moment ago."""
        if self._clock() - self._answered < FRESH_S:
            return ""
        problem = connect_problem(self._master, CONNECT_S)
        if problem:
            return f"mooncake_master at {self._master} does not answer: {problem}"
        self._answered = self._clock()
        return ""

    def _doubt_master(self) -> None:
        self._answered = float("-inf")

    def _values(self, job: _Job) -> PoolValues:
        """For the next call of a job: raises _Broken once it was cancelled."""
        if job.cancelled:
            raise _Broken("cancelled")
        if self._open_values is None:
            raise _Broken("the transfer was closed")
        return self._open_values

    # ------------------------------------------------------------------------------------------------------ store calls

    def _put(self, job: _Job, pieces: Sequence[Piece]) -> int:
        for first in range(0, len(pieces), CHUNK_KEYS):
            chunk = pieces[first : first + CHUNK_KEYS]
            shared = [p for p in chunk if not is_scoped(p.key)]
            scoped = [p for p in chunk if is_scoped(p.key)]
            if scoped:
                self._scope(job.attempt, [p.key for p in scoped], job.timeout_s)
                self._put_all(job, scoped, pinned=True)
            if shared:
                self._hold(job, shared)
                with self._wake:
                    self._written.setdefault(job.attempt, []).extend(shared)
        return sum(piece.nbytes for piece in pieces)

    def _hold(self, job: _Job, pieces: Sequence[Piece]) -> None:
        """Lease blocks, storing those that are not in the pool, or were evicted meanwhile.

        A put on a key that somebody else is putting just now succeeds at once, and the key is there only when that
        other put has ended: prompts that begin alike arrive together.
        """
        for first in range(0, len(pieces), CHUNK_KEYS):
            missing = self._lease(job, pieces[first : first + CHUNK_KEYS])
            pause, give_up = 0.0, float("inf")
            while missing:
                if self._clock() >= give_up:
                    raise _Broken(
                        f"{len(missing)} blocks are not in the pool {OTHERS_PUT_S:g} s after they were put: it is too "
                        "small for its load, or another process that puts the same blocks is stuck"
                    )
                self._closing.wait(pause)
                pause = pause + OTHERS_PAUSE_S
                self._put_all(job, missing, pinned=False)
                give_up = min(give_up, self._clock() + OTHERS_PUT_S)
                missing = self._lease(job, missing)

    def _put_all(self, job: _Job, pieces: Sequence[Piece], *, pinned: bool) -> None:
        left = list(pieces)
        for attempt in range(1, PUT_TRIES + 1):
            codes = self._values(job).put(left, job.seals, pinned=pinned)
            bad = [(p, code) for p, code in zip(left, codes, strict=True) if code != 0]
            if not bad:
                return
            key, code = bad[0][0].key, bad[0][1]
            if attempt == PUT_TRIES or any(code not in (NO_SPACE, OWNER_GONE) for _, code in bad):
                raise _Broken(f"{len(bad)} of {len(left)} blocks were not stored; {key}: {explain(code)}")
            left = [piece for piece, _ in bad]
            if any(code == NO_SPACE for _, code in bad):
                self._closing.wait(NO_SPACE_PAUSE_S)

    def _put_record(self, job: _Job, record: bytes) -> None:
        assert job.slot is not None
        with self._wake:
            written = tuple(self._written.get(job.attempt, ()))
        # A long prompt's first leases may have ended while the rest was computed.
        self._hold(job, written)
        key = record_key("", job.attempt)
        self._scope(job.attempt, [key], job.timeout_s)
        if code := self._values(job).put_record(key, job.slot, record):
            raise _Broken(f"the record was not stored: {explain(code)}")

    def _lease(self, job: _Job, pieces: Sequence[Piece]) -> list[Piece]:
        """Lease the pieces' keys; those that are not in the pool."""
        there = self._values(job).lease([p.key for p in pieces])
        return [piece for piece, found in zip(pieces, there, strict=True) if not found]

    def _get(self, job: _Job, pieces: Sequence[Piece]) -> int:
        for first in range(0, len(pieces), CHUNK_KEYS):
            self._get_whole(job, pieces[first : first + CHUNK_KEYS])
        return sum(piece.nbytes for piece in pieces)

    def _get_whole(self, job: _Job, pieces: Sequence[Piece]) -> None:
        """Read values until each is whole. One that is damaged in the pool goes: a put would not replace it."""
        left = pieces
        for _ in range(READ_TRIES):
            values = self._values(job)
            for piece, code in zip(left, values.get(left, job.seals), strict=True):
                if code < 0:
                    raise _Broken(f"block {piece.key}: {explain(code)}")
            left = values.damaged(left, job.seals)
            if not left:
                return
        keys = [piece.key for piece in left]
        problem = self._values(job).remove(keys)
        log.warning("removing %d damaged blocks from the pool: %s", len(keys), problem or "done")
        more = f", with {len(keys) - 1} others" if len(keys) > 1 else ""
        raise _Broken(f"block {keys[0]} is damaged in the pool{more}: its seal is not that of its bytes")

    # ---------------------------------------------------------------------------------------------- request-scoped keys

    def _scope(self, attempt: str, keys: Sequence[str], timeout_s: float) -> None:
        with self._wake:
            if attempt not in self._scoped:
                self._sweep.append((self._clock() + timeout_s + SWEEP_AFTER_S, attempt))
            self._scoped.setdefault(attempt, set()).update(keys)
            self._wake.notify_all()

    def _remove(self, attempt: str) -> None:
        with self._wake:
            keys = self._scoped.pop(attempt, None)
            self._sweep = [(t, name) for t, name in self._sweep if name != attempt]
        if keys and not self._closing.is_set():
            self._remove_keys(attempt, sorted(keys))

    def _remove_keys(self, attempt: str, keys: list[str]) -> None:
        def work(job: _Job) -> TransferResult:
            problem = self._values(job).remove(keys)
            return TransferResult(ok=not problem, moved_bytes=0, reason=problem)

        self._submit(f"remove {attempt}", work, self._timeout_s, lambda _: None, with_slot=False)
