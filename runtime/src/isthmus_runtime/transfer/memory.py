"""In-process transport with fault injection, for the simulator, tests and single-process runs. No mooncake, no torch.

A `MemoryFabric` connects endpoints and holds every operation in a heap of due times. Under a virtual clock it is a
pure function of (seed, calls, `advance(now)`); `start(clock)` drives it in real time instead. With addresses in
`KvRegion.base` bytes are copied; with base 0 only the keys are tracked (`contents`), which is what a simulator needs.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from ..errors import ConfigError, Overloaded
from ..interfaces.handoff import ReceiveJob
from ..interfaces.transport import CLOSE_S, Done, KvRegion, Piece, TransferResult
from ..protocol.ticket import Ticket
from .backend import Effective
from .places import reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Probability per operation (0 to 1) of each fault; at most one happens to an operation."""

    drop: float = 0.0
    """Nothing is moved, and the failure is reported."""
    partial: float = 0.0
    """Some pieces are moved, and a failure is reported."""
    wrote_all_but_failed: float = 0.0
    """Everything is moved, yet a failure is reported."""
    never: float = 0.0
    """No end is reported until the timeout (unsettled); the bytes land much later, or with the sender's crash never."""
    duplicate: float = 0.0
    """The end is reported twice."""
    stale: float = 0.0
    """A read finds the record but not the blocks."""
    evicted: float = 0.0
    """A read finds nothing."""
    damaged: float = 0.0
    """Of values in a storage pool, not of operations: other bytes are there than were put."""
    delay: float = 0.0
    """The operation takes `delay_s` longer."""
    delay_s: float = 0.2
    late_s: float = 5.0
    """After the timeout of a `never`, how long its bytes stay on their way."""


@dataclass(slots=True, kw_only=True)
class _Operation:
    attempt: str
    source: MemoryTransfer
    target: MemoryTransfer | None
    pieces: Sequence[Piece]
    record: bytes | None
    done: Done
    fault: str
    cancelled: bool = False


@dataclass(slots=True)
class _Endpoint:
    transfer: MemoryTransfer
    epoch: str
    is_drained: Callable[[str], bool] | None = None


class MemoryFabric:
    """The network between `MemoryTransfer`s. `seed` decides every fault; times are on the caller's clock."""

    def __init__(
        self,
        *,
        seed: int = 0,
        faults: Faults | None = None,
        latency_s: float = 0.0005,
        bytes_per_s: float = 10e9,
        record_slots: int = 4096,
    ) -> None:
        self.faults = faults or Faults()
        self.record_slots = record_slots
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._random = Random(seed)
        self._endpoints: dict[str, _Endpoint] = {}
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._changed = threading.Condition(threading.RLock())
        self._now = 0.0
        self._clock: Callable[[], float] | None = None
        self._thread: threading.Thread | None = None
        self._in_flight: dict[int, _Operation] = {}

    def connect(self, name: str, epoch: str) -> MemoryTransfer:
        """A new endpoint; `name` is what peers use as `peer_url`. Connecting a name again is a restart."""
        with self._changed:
            self.crash(name)
            transfer = MemoryTransfer(self, name)
            self._endpoints[name] = _Endpoint(transfer, epoch)
            return transfer

    def serve_drain(self, name: str, is_drained: Callable[[str], bool]) -> None:
        """Let peers ask the endpoint's agent, as `GET /internal/drained` does between processes."""
        self._endpoints[name].is_drained = is_drained

    def crash(self, name: str) -> None:
        """The endpoint's process is gone: its operations neither end nor move another byte."""
        with self._changed:
            endpoint = self._endpoints.pop(name, None)
            if endpoint is not None:
                gone = [k for k, op in self._in_flight.items() if op.source is endpoint.transfer]
                for key in gone:
                    del self._in_flight[key]

    def advance(self, now: float) -> None:
        """Let everything happen that is due by `now`, in order of time."""
        while True:
            with self._changed:
                if not self._heap or self._heap[0][0] > now:
                    self._now = max(self._now, now)
                    return
                due, _, action = heapq.heappop(self._heap)
                self._now = max(self._now, due)
            action(due)

    def next_time(self) -> float | None:
        """When `advance` has something to do, or None."""
        with self._changed:
            return self._heap[0][0] if self._heap else None

    def start(self, clock: Callable[[], float]) -> None:
        """Drive the fabric from a thread in real time."""
        self._clock = clock
        self._thread = threading.Thread(target=self._run, args=(clock,), name="memory-fabric", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread of `start`."""
        with self._changed:
            self._clock = None
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self, clock: Callable[[], float]) -> None:
        while True:
            with self._changed:
                if self._clock is None:
                    return
                due = self.next_time()
                if due is None or due > clock():
                    self._changed.wait(None if due is None else max(0.0, due - clock()))
                    continue
            self.advance(clock())

    def _time(self) -> float:
        return self._clock() if self._clock is not None else self._now

    def _at(self, delay_s: float, action: Callable[[float], None]) -> None:
        with self._changed:
            heapq.heappush(self._heap, (self._time() + delay_s, next(self._order), action))
            self._changed.notify_all()

    # ---------------------------------------------------------------------------------------------------- operations

    def _draw(self, names: Sequence[str]) -> str:
        point = self._random.random()
        for name in names:
            point -= getattr(self.faults, name)
            if point < 0:
                return name
        return ""

    def _begin(self, op: _Operation, timeout_s: float, apply: Callable[[_Operation], TransferResult]) -> None:
        key = next(self._order)
        with self._changed:
            self._in_flight[key] = op
            size = sum(piece.nbytes for piece in op.pieces)
            duration = self._latency_s + size / self._bytes_per_s
            duration += self.faults.delay_s if op.fault == "delay" else 0.0
            never = op.fault == "never" or duration > timeout_s

        def end(_: float) -> None:
            with self._changed:
                if self._in_flight.pop(key, None) is None:
                    return
                result = apply(op)
            if never:
                return
            op.done(result)
            if op.fault == "duplicate":
                op.done(result)

        def time_out(_: float) -> None:
            with self._changed:
                if key not in self._in_flight:
                    return
            op.done(TransferResult(ok=False, moved_bytes=0, reason=f"no end within {timeout_s:.3g} s", settled=False))

        if never:
            self._at(timeout_s, time_out)
            self._at(max(timeout_s, duration) + self.faults.late_s, end)
        else:
            self._at(duration, end)

    def _moving(self, attempt: str, source: MemoryTransfer | None, target: MemoryTransfer | None) -> bool:
        with self._changed:
            return any(
                op.attempt == attempt
                and (source is None or op.source is source)
                and (target is None or op.target is target)
                for op in self._in_flight.values()
            )

    def _ask(self, who: MemoryTransfer, attempt: str, peer: str, epoch: str, done: Callable[[bool], None]) -> None:
        def answer(_: float) -> None:
            endpoint = self._endpoints.get(peer) if peer else None
            mine = not self._moving(attempt, who, None)
            if endpoint is None or endpoint.epoch != epoch:
                # Asked about this process alone, or the peer is gone: only what is still in the air counts.
                done(mine and not self._moving(attempt, None, who))
                return
            theirs = endpoint.is_drained is None or endpoint.is_drained(attempt)
            done(mine and theirs and not self._moving(attempt, None, who))

        self._at(self._latency_s, answer)


@dataclass(slots=True, eq=False)
class MemoryTransfer:
    """One endpoint; made by `MemoryFabric.connect`. Implements `TransferBackend`."""

    fabric: MemoryFabric
    name: str
    contents: dict[int, str] = field(default_factory=dict)
    """Key last written into each block by a peer."""
    on_block_written: Callable[[str, int], None] | None = None
    """Called with (attempt, block id) before a peer's write lands: lets a simulator catch writes into reused blocks."""
    _region: KvRegion | None = None
    _slots: dict[str, bytes] = field(default_factory=dict)

    @property
    def peer_writes(self) -> bool:
        """Like `direct`: the sender writes here."""
        return True

    @property
    def seals_blocks(self) -> bool:
        return False

    def prepare(self, region: KvRegion, timeout_s: float) -> None:
        if timeout_s <= 0:
            raise ConfigError(f"timeout of {timeout_s} s to prepare endpoint {self.name!r}: must be above 0")
        self._region = region

    def effective(self) -> Effective:
        return Effective("memory", 0.0)

    def reserve(self, job: ReceiveJob, layout_digest: str) -> Ticket:
        if len(self._slots) >= self.fabric.record_slots:
            raise Overloaded(f"all {self.fabric.record_slots} record slots of this decode are taken")
        assert self._region is not None, "prepare comes first"
        self._slots[job.attempt] = b""
        return Ticket(
            mode="memory",
            attempt=job.attempt,
            layout_digest=layout_digest,
            skip_blocks=job.skip_blocks,
            session=f"{self.name}@{self.fabric._endpoints[self.name].epoch}",
            pool_base=self._region.base,
            block_stride=self._region.block_stride,
            blocks=reserved(job.blocks),
        )

    def write(
        self,
        attempt: str,
        ticket: Ticket,
        pieces: Sequence[Piece],
        record: bytes | None,
        timeout_s: float,
        done: Done,
    ) -> None:
        name, _, epoch = ticket.session.rpartition("@")
        endpoint = self.fabric._endpoints.get(name)
        if endpoint is not None and endpoint.epoch != epoch:
            endpoint = None  # restarted: its addresses are others now
        op = _Operation(
            attempt=attempt,
            source=self,
            target=endpoint.transfer if endpoint else None,
            pieces=pieces,
            record=record,
            done=done,
            fault=self.fabric._draw(("drop", "partial", "wrote_all_but_failed", "never", "duplicate", "delay")),
        )
        self.fabric._begin(op, timeout_s, self._apply_write)

    def _apply_write(self, op: _Operation) -> TransferResult:
        target = op.target
        gone = target is None or self.fabric._endpoints.get(target.name, _Endpoint(self, "")).transfer is not target
        if target is None or gone:
            return TransferResult(ok=False, moved_bytes=0, reason="decode is gone")
        if op.cancelled:
            return TransferResult(ok=False, moved_bytes=0, reason="cancelled")
        count = len(op.pieces)
        if op.fault == "drop":
            return TransferResult(ok=False, moved_bytes=0, reason="injected: dropped")
        if op.fault == "partial":
            count //= 2
        moved = sum(target._land(self, op.attempt, piece) for piece in op.pieces[:count])
        if op.fault == "partial":
            return TransferResult(ok=False, moved_bytes=moved, reason="injected: partly written")
        if op.record is not None and op.attempt in target._slots:
            target._slots[op.attempt] = op.record
        if op.fault == "wrote_all_but_failed":
            return TransferResult(ok=False, moved_bytes=moved, reason="injected: failure after the last byte")
        return TransferResult(ok=True, moved_bytes=moved)

    def _land(self, source: MemoryTransfer, attempt: str, piece: Piece) -> int:
        mine, theirs = self._region, source._region
        assert mine is not None and theirs is not None
        block = (piece.remote_address - mine.base) // mine.block_stride
        if self.on_block_written is not None:
            self.on_block_written(attempt, block)
        self.contents[block] = piece.key
        if mine.base and theirs.base:
            ctypes.memmove(
                piece.remote_address, theirs.base + piece.block_id * theirs.block_stride + piece.offset, piece.nbytes
            )
        return piece.nbytes

    def read(self, attempt: str, pieces: Sequence[Piece], timeout_s: float, done: Done) -> None:
        op = _Operation(
            attempt=attempt,
            source=self,
            target=None,
            pieces=(),
            record=None,
            done=done,
            fault=self.fabric._draw(("stale", "evicted", "delay", "duplicate")),
        )
        wanted = tuple(pieces)

        def apply(op: _Operation) -> TransferResult:
            record = self._slots.get(attempt, b"")
            if op.fault == "evicted" or not record:
                return TransferResult(ok=False, moved_bytes=0, reason="the record is missing")
            missing = [p.key for p in wanted if self.contents.get(p.block_id) != p.key]
            if op.fault == "stale" or missing:
                reason = f"{len(missing)} blocks are missing"
                return TransferResult(ok=False, moved_bytes=0, reason=reason, record=record)
            return TransferResult(ok=True, moved_bytes=sum(p.nbytes for p in wanted), record=record)

        self.fabric._begin(op, timeout_s, apply)

    def fetch(self, attempt: str, pieces: Sequence[Piece], timeout_s: float, done: Done) -> None:
        done(TransferResult(ok=True, moved_bytes=0))

    def cancel(self, attempt: str) -> None:
        with self.fabric._changed:
            for op in self.fabric._in_flight.values():
                if op.attempt == attempt and op.source is self and op.fault != "never":
                    op.cancelled = True

    def drained(self, attempt: str, peer_url: str, peer_epoch: str, done: Callable[[bool], None]) -> None:
        self.fabric._ask(self, attempt, peer_url, peer_epoch, done)

    def expect(self, ticket: Ticket) -> None:
        """Nothing is needed of a peer."""

    def forget(self, attempt: str) -> None:
        self._slots.pop(attempt, None)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        self.fabric.crash(self.name)
