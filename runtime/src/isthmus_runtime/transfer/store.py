"""Store mode: prefill puts blocks into the Mooncake storage pool, decode fetches them. Neither knows the other.

Full blocks are named by their content and stay as a shared prefix cache. The incomplete last block (`:partial:`) and
the record belong to one attempt: hard-pinned, removed by decode when it has them or gives up, and swept by prefill
later in case decode could not (`scoped_keys`). How values move is in `pool_moves`, who calls the pool in `pool_jobs`.

Values go to the segment of whoever puts them as long as it has room (docs/adr/0009): a put then depends on nobody else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from ..config import apply_native_environment
from ..interfaces.handoff import ReceiveJob
from ..interfaces.transport import CLOSE_S, Done, KvRegion, Piece, TransferResult
from ..kv.keys import record_key
from ..protocol.ticket import Ticket
from .backend import Effective
from .bounded import TookTooLong, built_for_cpus, connect_problem, run_bounded
from .joining import StorePool, join_pool, leave_behind
from .pool_jobs import CONNECT_S, Job, Master, PoolJobs
from .pool_moves import CHUNK_KEYS, PoolMoves, chunks
from .pool_values import PoolValues, SealRoom
from .scoped_keys import ScopedKeys, is_scoped
from .seal import SEAL_BYTES
from .slots import SLOT_BYTES
from .transport import check_memory, transport_environment

CALL_THREADS = 4
LAST_ASK_S = 2.0
"""A master that is stopped accepts connections, and answers nothing."""
SWEEP_AFTER_S = 60.0
"""After its timeout, when prefill removes keys that decode should have removed."""


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
        self._master_address = master
        self._segment_bytes = segment_bytes
        self._replicas = replicas
        self._secret = secret
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._scoped = ScopedKeys()
        self._written: dict[str, list[Piece]] = {}
        """Shared blocks put so far, per attempt that has no record yet."""
        self._seals = SealRoom(CALL_THREADS, CHUNK_KEYS)
        self._master = Master(master, clock)
        self._jobs = PoolJobs(self._master, clock)
        self._pool: StorePool | None = None
        self._moves: PoolMoves | None = None

    @property
    def peer_writes(self) -> bool:
        return False

    @property
    def seals_blocks(self) -> bool:
        return True

    def effective(self) -> Effective:
        return Effective("tcp", 0.0 if self._pool is None else self._pool.gbps)

    def prepare(self, region: KvRegion, timeout_s: float) -> None:
        """See `KvTransfer`; also puts values into the pool and reads them back."""
        check_memory("store", region.device, built_for_cpus=built_for_cpus())
        apply_native_environment(transport_environment("tcp", self._host, self._timeout_s))
        regions = {
            "the KV pool": (region.base, region.num_blocks * region.block_stride),
            "records": (self._jobs.slots.base, self._jobs.slots.nbytes),
            "seals": (self._seals.base, self._seals.nbytes),
        }
        self._pool = join_pool(self._host, self._master_address, self._segment_bytes, regions, timeout_s, self._clock)
        values = PoolValues(
            self._pool, region, replicas=self._replicas, secret=self._secret, unreachable=self._master.doubt
        )
        self._moves = PoolMoves(values, self._jobs.pause, self._clock)
        self._jobs.start([self._seals.places(caller) for caller in range(CALL_THREADS)])

    # -------------------------------------------------------------------------------------------------------- calls

    def reserve(self, job: ReceiveJob, layout_digest: str) -> Ticket:
        keys = [block.key for block in job.blocks if is_scoped(block.key)]
        with self._lock:
            self._scoped.expect(job.attempt, [*keys, record_key("", job.attempt)])
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
        moving, moves = tuple(pieces), self._ready()

        def work(job: Job) -> TransferResult:
            for chunk in chunks(moving):
                self._put(moves, job, chunk)
            if record is not None:
                self._put_record(moves, job, record)
            return TransferResult(ok=True, moved_bytes=sum(piece.nbytes for piece in moving))

        self._jobs.submit(attempt, work, timeout_s, done, with_slot=record is not None)

    def _put(self, moves: PoolMoves, job: Job, chunk: Sequence[Piece]) -> None:
        shared = [piece for piece in chunk if not is_scoped(piece.key)]
        scoped = [piece for piece in chunk if is_scoped(piece.key)]
        if scoped:
            self._scope(job, [piece.key for piece in scoped])
            moves.put(job, scoped)
        if shared:
            moves.hold(job, shared)
            with self._lock:
                self._written.setdefault(job.attempt, []).extend(shared)

    def _put_record(self, moves: PoolMoves, job: Job, record: bytes) -> None:
        with self._lock:
            written = tuple(self._written.get(job.attempt, ()))
        # A long prompt's first leases may have ended while the rest was computed.
        moves.hold(job, written)
        key = record_key("", job.attempt)
        self._scope(job, [key])
        moves.put_record(job, key, record)

    def read(self, attempt: str, pieces: Sequence[Piece], timeout_s: float, done: Done) -> None:
        moving, moves = tuple(pieces), self._ready()

        def work(job: Job) -> TransferResult:
            record = moves.get_record(job, record_key("", attempt))
            moves.get(job, moving)
            return TransferResult(ok=True, moved_bytes=sum(piece.nbytes for piece in moving), record=record)

        self._jobs.submit(attempt, work, timeout_s, done, with_slot=True)

    def fetch(self, attempt: str, pieces: Sequence[Piece], timeout_s: float, done: Done) -> None:
        moving, moves = tuple(pieces), self._ready()

        def work(job: Job) -> TransferResult:
            found = moves.get_first(job, moving)
            return TransferResult(ok=True, moved_bytes=sum(piece.nbytes for piece in moving[:found]))

        self._jobs.submit(attempt, work, timeout_s, done, with_slot=False)

    def cancel(self, attempt: str) -> None:
        self._jobs.cancel(attempt)

    def drained(self, attempt: str, peer_url: str, peer_epoch: str, done: Callable[[bool], None]) -> None:
        """Nobody writes into another's memory: only calls running here count."""
        done(not self._jobs.moving(attempt))

    def expect(self, ticket: Ticket) -> None:
        """Nothing is needed of a peer."""

    def forget(self, attempt: str) -> None:
        """Decode removes the attempt's keys. Prefill's stay until decode did, and are swept later."""
        with self._lock:
            self._written.pop(attempt, None)
            ours = self._scoped.end_with(attempt)
        if ours:
            self._remove(attempt)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        ends_at = time.monotonic() + timeout_s
        idle = self._jobs.close(timeout_s)
        if self._pool is None or self._moves is None:
            return
        store, probed = self._pool.store, self._pool.probe_over.is_set()
        self._moves.close()
        self._pool = self._moves = None
        # Closing it under a call that still runs, as into a master that is stopped, ends the process by a signal.
        if not (idle and probed) or connect_problem(self._master_address, CONNECT_S):
            leave_behind(store)
            return
        left = max(0.0, ends_at - time.monotonic())
        try:
            # Closing keeps the interpreter lock: nobody could give it up. This call does not.
            run_bounded(lambda: store.batch_is_exist(["closing"]), min(LAST_ASK_S, left), "transfer-close")
        except TookTooLong:
            leave_behind(store)
            return
        store.close()

    # ---------------------------------------------------------------------------------------------------------- within

    def _ready(self) -> PoolMoves:
        assert self._moves is not None, "prepare first; after close nothing moves"
        return self._moves

    def _scope(self, job: Job, keys: Sequence[str]) -> None:
        with self._lock:
            first = self._scoped.write(job.attempt, keys)
        if first:
            self._jobs.later(job.timeout_s + SWEEP_AFTER_S, partial(self._remove, job.attempt))

    def _remove(self, attempt: str) -> None:
        with self._lock:
            keys = self._scoped.pop(attempt)
        moves = self._moves
        if not keys or moves is None or self._jobs.closing:
            return

        def work(job: Job) -> TransferResult:
            problem = moves.remove(job, keys)
            return TransferResult(ok=not problem, moved_bytes=0, reason=problem)

        self._jobs.submit(f"remove {attempt}", work, self._timeout_s, lambda _: None, with_slot=False)
