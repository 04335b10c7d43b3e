"""Store mode: prefill puts blocks into the Mooncake storage pool, decode fetches them. Neither knows the other.

Full blocks are named by their content and stay as a shared prefix cache. The incomplete last block (`:partial:`) and
the record belong to one attempt: hard-pinned, removed by decode when it has them or gives up, and swept by prefill
later in case decode could not. A full block is protected from eviction until decode reads it by a lease, taken with
`is_exist` right after the put (docs/adr/0004): that also covers blocks that were in the pool before, and shows
whether a block was evicted between the two calls.

Calls into a master that died block for seconds, so they run in threads of their own and a watch thread gives them up. A
call that was given up may still read or write the KV pool: its attempt is not drained before the call returns.

Values go to the segment of whoever puts them as long as it has room (docs/adr/0009): a put then depends on nobody else.

The pool does not keep late bytes of a failed put out of memory that it has given to another key meanwhile, so what
decode reads is checked (docs/adr/0007), and values found wrong are removed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..config import apply_transport_environment
from ..interfaces.handoff import ReceiveJob
from ..interfaces.transport import Done, KvRegion, Piece, TransferResult
from ..kv.keys import record_key
from ..protocol import Ticket
from .backend import Effective
from .bounded import TookTooLong, built_for_cpus, connect_problem, run_bounded
from .joining import StorePool, join_pool, leave_behind
from .pool_codes import MISSING, NO_SPACE, OWNER_GONE, UNREACHABLE, explain
from .slots import SLOT_BYTES, RecordSlots
from .transport import check_memory, transport_environment

log = logging.getLogger(__name__)

CALL_THREADS = 4
CHUNK_KEYS = 256
"""Keys per call: keeps a call well inside the pool's lease."""
STALL_S = 0.3
"""A call that takes longer makes the watch look whether the master still answers."""
CONNECT_S = 0.25
CLOSE_S = 2.0
"""A master that is stopped accepts connections, and answers nothing."""
FRESH_S = 0.25
"""The master is not asked again within this time of an answer."""
NO_SPACE_PAUSE_S = 0.2
PUT_TRIES = 3
"""A put that found no space, or the segment of a pod that is gone, is tried on: the pool chooses again."""
OTHERS_PUT_S = 0.5
"""How long a key that another process is putting may stay incomplete."""
OTHERS_PAUSE_S = 0.005
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


class StoreTransfer:
    """Implements `TransferBackend` over MooncakeDistributedStore. `host`: the address peers reach this process at."""

    def __init__(
        self,
        *,
        host: str,
        master: str,
        segment_bytes: int,
        replicas: int = 1,
        timeout_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._master = master
        self._segment_bytes = segment_bytes
        self._replicas = replicas
        self._timeout_s = timeout_s
        self._clock = clock
        self._wake = threading.Condition()
        self._closing = threading.Event()
        self._queue: deque[_Job] = deque()
        self._jobs: list[_Job] = []
        self._slots = RecordSlots()
        self._scoped: dict[str, set[str]] = {}
        """Request-scoped keys to remove, per attempt."""
        self._written: dict[str, list[Piece]] = {}
        """Shared blocks put so far, per attempt that has no record yet."""
        self._sweep: list[tuple[float, str]] = []
        self._answered = float("-inf")
        self._threads: list[threading.Thread] = []
        self._pool: StorePool | None = None
        self._region: KvRegion | None = None

    @property
    def peer_writes(self) -> bool:
        return False

    def effective(self) -> Effective:
        return Effective("tcp", 0.0 if self._pool is None else self._pool.gbps)

    # ------------------------------------------------------------------------------------------------------- start-up

    def prepare(self, region: KvRegion, timeout_s: float) -> None:
        """As in `KvTransfer`; also puts values into the pool and reads them back."""
        check_memory("store", region.device, built_for_cpus=built_for_cpus())
        apply_transport_environment(transport_environment("tcp", self._timeout_s))
        regions = {
            "the KV pool": (region.base, region.num_blocks * region.block_stride),
            "records": (self._slots.base, self._slots.nbytes),
        }
        self._region = region
        self._pool = join_pool(self._host, self._master, self._segment_bytes, regions, timeout_s, self._clock)
        bodies = [self._work] * CALL_THREADS + [self._watch]
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
        if record is not None and len(record) > SLOT_BYTES:
            raise ValueError(f"record of {len(record)} bytes; the limit is {SLOT_BYTES}")
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
            self._slots.clear(job.slot)
            length = self._get_codes(job, [record_key("", attempt)], [job.slot], [SLOT_BYTES])[0]
            if length < 0:
                raise _Broken(f"the record of attempt {attempt}: {explain(length)}")
            record = self._slots.read(job.slot)[:length]
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

    def distrust(self, keys: Sequence[str]) -> None:
        """Remove the values, by force: a put on an existing key keeps the old value, so they would never heal."""
        log.warning("the pool returned other bytes than were stored: removing %d keys", len(keys))
        self._remove_keys("distrusted", list(keys))

    def close(self) -> None:
        self._closing.set()
        with self._wake:
            self._wake.notify_all()
        for thread in self._threads:
            # One may sit in a call that does not end; it is a daemon.
            thread.join(timeout=1.0)
        if self._pool is not None:
            store, probing, self._pool = self._pool.store, not self._pool.probe_over.is_set(), None
            # Closing it under a call that still runs, as into a master that is stopped, ends the process by a signal.
            working = probing or any(thread.is_alive() for thread in self._threads)
            if working or connect_problem(self._master, CONNECT_S):
                leave_behind(store)
                return
            try:
                # Closing keeps the interpreter lock: nobody could give it up. This call does not.
                run_bounded(lambda: store.batch_is_exist(["closing"]), CLOSE_S, "transfer-close")
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

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closing.is_set():
                    self._wake.wait()
                if self._closing.is_set():
                    return
                job = self._queue.popleft()
                job.started = True
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

    @property
    def _joined(self) -> StorePool:
        if self._pool is None:
            raise _Broken("the transfer was closed")
        return self._pool

    def _check(self, job: _Job) -> None:
        if job.cancelled:
            raise _Broken("cancelled")

    # ------------------------------------------------------------------------------------------------------ store calls

    def _address(self, piece: Piece) -> int:
        assert self._region is not None
        return self._region.base + piece.block_id * self._region.block_stride + piece.offset

    def _put(self, job: _Job, pieces: Sequence[Piece]) -> int:
        for first in range(0, len(pieces), CHUNK_KEYS):
            chunk = pieces[first : first + CHUNK_KEYS]
            shared = [p for p in chunk if not is_scoped(p.key)]
            scoped = [p for p in chunk if is_scoped(p.key)]
            if scoped:
                self._scope(job.attempt, [p.key for p in scoped], job.timeout_s)
                self._put_all(job, scoped, pinned=True)
            if shared:
                self._put_all(job, shared, pinned=False)
                self._hold(job, shared)
                with self._wake:
                    self._written.setdefault(job.attempt, []).extend(shared)
        return sum(piece.nbytes for piece in pieces)

    def _hold(self, job: _Job, pieces: Sequence[Piece]) -> None:
        """Lease blocks, storing again what was evicted meanwhile.

        A put on a key that somebody else is putting just now succeeds at once, and the key is there only when that
        other put has ended: prompts that begin alike arrive together.
        """
        give_up = self._clock() + OTHERS_PUT_S
        for first in range(0, len(pieces), CHUNK_KEYS):
            missing = self._lease(job, pieces[first : first + CHUNK_KEYS])
            pause = 0.0
            while missing:
                if self._clock() >= give_up:
                    raise _Broken(
                        f"{len(missing)} blocks are not in the pool {OTHERS_PUT_S:g} s after they were put: it is too "
                        "small for its load, or another process that puts the same blocks is stuck"
                    )
                self._closing.wait(pause)
                pause = pause + OTHERS_PAUSE_S
                self._put_all(job, missing, pinned=False)
                missing = self._lease(job, missing)

    def _put_all(self, job: _Job, pieces: Sequence[Piece], *, pinned: bool) -> None:
        left = list(pieces)
        for attempt in range(1, PUT_TRIES + 1):
            codes = self._put_codes(
                job, [p.key for p in left], [self._address(p) for p in left], [p.nbytes for p in left], pinned=pinned
            )
            bad = [(p, code) for p, code in zip(left, codes, strict=True) if code != 0]
            if not bad:
                return
            key, code = bad[0][0].key, bad[0][1]
            if attempt == PUT_TRIES or any(code not in (NO_SPACE, OWNER_GONE) for _, code in bad):
                raise _Broken(f"{len(bad)} of {len(left)} blocks were not stored; {key}: {explain(code)}")
            left = [piece for piece, _ in bad]
            if any(code == NO_SPACE for _, code in bad):
                self._closing.wait(NO_SPACE_PAUSE_S)

    def _put_codes(
        self, job: _Job, keys: list[str], addresses: list[int], sizes: list[int], *, pinned: bool
    ) -> list[int]:
        self._check(job)
        config = self._joined.native.ReplicateConfig()
        config.replica_num = self._replicas
        config.with_hard_pin = pinned
        config.preferred_segment = self._joined.segment
        codes: list[int] = self._joined.store.batch_put_from(keys, addresses, sizes, config)
        return self._seen(codes)

    def _put_record(self, job: _Job, record: bytes) -> None:
        assert job.slot is not None
        with self._wake:
            written = tuple(self._written.get(job.attempt, ()))
        # A long prompt's first leases may have ended while the rest was computed.
        self._hold(job, written)
        self._slots.write(job.slot, record)
        key = record_key("", job.attempt)
        self._scope(job.attempt, [key], job.timeout_s)
        code = self._put_codes(job, [key], [job.slot], [len(record)], pinned=True)[0]
        if code != 0:
            raise _Broken(f"the record was not stored: {explain(code)}")

    def _lease(self, job: _Job, pieces: Sequence[Piece]) -> list[Piece]:
        """Lease the pieces' keys; those that are not in the pool any more."""
        self._check(job)
        codes = self._seen(self._joined.store.batch_is_exist([p.key for p in pieces]))
        return [piece for piece, code in zip(pieces, codes, strict=True) if code != 1]

    def _get(self, job: _Job, pieces: Sequence[Piece]) -> int:
        for first in range(0, len(pieces), CHUNK_KEYS):
            chunk = pieces[first : first + CHUNK_KEYS]
            codes = self._get_codes(
                job, [p.key for p in chunk], [self._address(p) for p in chunk], [p.nbytes for p in chunk]
            )
            for piece, code in zip(chunk, codes, strict=True):
                if code < 0:
                    raise _Broken(f"block {piece.key}: {explain(code)}")
                if code != piece.nbytes:
                    raise _Broken(f"block {piece.key} has {code} bytes in the pool, expected {piece.nbytes}")
        return sum(piece.nbytes for piece in pieces)

    def _get_codes(self, job: _Job, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self._check(job)
        return self._seen(self._joined.store.batch_get_into(keys, addresses, sizes))

    def _seen(self, codes: list[int]) -> list[int]:
        if any(code in UNREACHABLE for code in codes):
            self._answered = float("-inf")
        return codes

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
        def work(_: _Job) -> TransferResult:
            # By force: the read just done holds a lease. What was never stored or is gone already is fine.
            codes = self._seen(self._joined.store.batch_remove(keys, True))
            bad = [code for code in codes if code not in (0, MISSING)]
            return TransferResult(ok=not bad, moved_bytes=0, reason=explain(bad[0]) if bad else "")

        self._submit(f"remove {attempt}", work, self._timeout_s, lambda _: None, with_slot=False)
