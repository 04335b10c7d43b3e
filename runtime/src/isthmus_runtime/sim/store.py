"""A model of the KV store in virtual time: keys, eviction, loss on restart, and the faults of its transport.

Stands for a Mooncake pool where the real client cannot run under a virtual clock. What matters is kept: `put` on an
existing key succeeds and keeps the old value, objects that are not pinned are evicted, a restarted master has
forgotten everything, existence may be stale, a value may be damaged once it was put, and a read writes into the
reader's own blocks. Values carry the seals of the real client.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import Overloaded
from ..interfaces.handoff import ReceiveJob
from ..interfaces.transport import CLOSE_S, Done, KvRegion, Piece, TransferResult
from ..kv.keys import record_key
from ..protocol.ticket import Ticket
from ..transfer.backend import Effective
from ..transfer.memory import Faults
from ..transfer.seal import SEAL_BYTES, is_sealed, seal
from .clock import Clock

SCOPED_TTL_S = 10.0
"""Request-scoped keys that nobody removed are swept after this long."""
LATENCY_S = 0.001


@dataclass(slots=True, eq=False)
class StoreOperation:
    """A write or read under way."""

    attempt: str
    source: StoreTransfer | None
    """Whose blocks are read (a write)."""
    target: StoreTransfer | None
    """Whose blocks are written (a read)."""
    pieces: Sequence[Piece]
    fault: str
    record: bytes | None = None
    cancelled: bool = False


@dataclass(slots=True)
class _Value:
    data: bytes
    """With its seal."""
    attempt: str
    """The attempt a scoped key belongs to; empty for full blocks, which everyone shares."""


class Store:
    """The pool and its master."""

    def __init__(
        self, clock: Clock, faults: Faults, bytes_per_s: float, capacity: int, on_put: Callable[[str, bytes], None]
    ) -> None:
        self.clock = clock
        self.faults = faults
        self.up = True
        self.operations: dict[int, StoreOperation] = {}
        self.values: OrderedDict[str, _Value] = OrderedDict()
        self._bytes_per_s = bytes_per_s
        self._capacity = capacity
        self._on_put = on_put
        self._next = 0

    def crash(self) -> None:
        """The master is gone, and every key with it."""
        self.up = False
        self.values.clear()

    def restart(self) -> None:
        """An empty master answers again."""
        self.up = True

    def scoped(self) -> list[str]:
        """Keys that belong to one attempt."""
        return [key for key, value in self.values.items() if value.attempt]

    def put(self, key: str, data: bytes, attempt: str) -> bool:
        """False when there is no space. An existing key keeps its value."""
        if key in self.values:
            return True
        while len(self.values) >= self._capacity:
            victim = next((k for k, v in self.values.items() if not v.attempt), None)
            if victim is None:
                return False
            del self.values[victim]
        value = _Value(data + seal(b"", key, data), attempt)
        self.values[key] = value
        self._on_put(key, data)
        if self.faults.damaged and self.clock.chance(self.faults.damaged):
            value.data = bytes([value.data[0] ^ 1]) + value.data[1:]
        if attempt:

            def sweep() -> None:
                if self.values.get(key) is value:
                    del self.values[key]

            self.clock.after(SCOPED_TTL_S, sweep)
        return True

    def get(self, key: str) -> bytes | None:
        """The value and its seal; it becomes the most recently used. None when it is not there."""
        value = self.values.get(key)
        if value is None:
            return None
        self.values.move_to_end(key)
        return value.data

    def remove_damaged(self, key: str) -> None:
        """Drop a value that its reader found damaged. AssertionError: it is not, and others share it."""
        if (value := self.values.get(key)) is not None:
            assert not whole(key, value.data), f"{key} is not damaged, and was removed"
            del self.values[key]

    def remove_scoped(self, attempt: str) -> None:
        """Drop the tail and the record of an attempt."""
        for key in [k for k, v in self.values.items() if v.attempt == attempt]:
            del self.values[key]

    def begin(
        self, operation: StoreOperation, timeout_s: float, apply: Callable[[], TransferResult], done: Done
    ) -> None:
        """Let an operation take its time, or go wrong."""
        number = self._next
        self._next += 1
        self.operations[number] = operation
        took = LATENCY_S + sum(p.nbytes for p in operation.pieces) / self._bytes_per_s
        took += self.faults.delay_s if operation.fault == "delay" else 0.0
        never = operation.fault == "never" or took > timeout_s

        def end() -> None:
            if self.operations.pop(number, None) is None:
                return
            result = apply()
            if never:
                return
            done(result)
            if operation.fault == "duplicate":
                done(result)

        def time_out() -> None:
            if number in self.operations:
                reason = f"no end within {timeout_s:.3g} s"
                done(TransferResult(ok=False, moved_bytes=0, reason=reason, settled=False))

        if never:
            self.clock.after(timeout_s, time_out)
            self.clock.after(max(timeout_s, took) + self.faults.late_s, end)
        else:
            self.clock.after(took, end)

    def draw(self, names: Sequence[str]) -> str:
        """The fault of the next operation, or an empty text."""
        point = self.clock.random.random()
        for name in names:
            point -= getattr(self.faults, name)
            if point < 0:
                return name
        return ""

    def forget_process(self, transfer: StoreTransfer) -> None:
        """A client process died: its operations move nothing more."""
        gone = [k for k, op in self.operations.items() if transfer in (op.source, op.target)]
        for key in gone:
            del self.operations[key]


def whole(key: str, value: bytes) -> bool:
    """Whether a value is what was put under its key."""
    return is_sealed(b"", key, value[:-SEAL_BYTES], value[-SEAL_BYTES:])


@dataclass(slots=True, eq=False)
class StoreTransfer:
    """One process's client of the store. Implements `TransferBackend`."""

    store: Store
    record_slots: int
    on_block_written: Callable[[str, int], None] | None = None
    _region: KvRegion | None = None
    _reserved: set[str] = field(default_factory=set)

    @property
    def peer_writes(self) -> bool:
        """The receiver fetches."""
        return False

    @property
    def seals_blocks(self) -> bool:
        """Each value says whether it is whole."""
        return True

    def prepare(self, region: KvRegion, timeout_s: float) -> None:
        """Remember where the blocks are."""
        self._region = region

    def effective(self) -> Effective:
        """Nothing is probed."""
        return Effective("store-model", 0.0)

    def reserve(self, job: ReceiveJob, layout_digest: str) -> Ticket:
        """No address is needed."""
        if len(self._reserved) >= self.record_slots:
            raise Overloaded(f"all {self.record_slots} record slots of this decode are taken")
        self._reserved.add(job.attempt)
        return Ticket(mode="store", attempt=job.attempt, layout_digest=layout_digest, skip_blocks=job.skip_blocks)

    def record_name(self, attempt: str) -> str:
        """Key of the record."""
        return record_key("", attempt)

    def write(
        self, attempt: str, ticket: Ticket, pieces: Sequence[Piece], record: bytes | None, timeout_s: float, done: Done
    ) -> None:
        """Put blocks, then the record."""
        names = ("drop", "partial", "wrote_all_but_failed", "never", "duplicate", "delay")
        operation = StoreOperation(attempt, self, None, pieces, self.store.draw(names), record)

        def apply() -> TransferResult:
            problem = self._blocked(operation)
            if problem:
                return TransferResult(ok=False, moved_bytes=0, reason=problem)
            count = len(pieces) // 2 if operation.fault == "partial" else len(pieces)
            moved = 0
            for piece in pieces[:count]:
                scope = attempt if ":partial:" in piece.key else ""
                if not self.store.put(piece.key, self._bytes(piece), scope):
                    return TransferResult(ok=False, moved_bytes=moved, reason="the pool has no space (-200)")
                moved += piece.nbytes
            if operation.fault == "partial":
                return TransferResult(ok=False, moved_bytes=moved, reason="injected: partly written")
            if record is not None and not self.store.put(self.record_name(attempt), record, attempt):
                return TransferResult(ok=False, moved_bytes=moved, reason="the pool has no space for the record (-200)")
            if operation.fault == "wrote_all_but_failed":
                return TransferResult(ok=False, moved_bytes=moved, reason="injected: failure after the last byte")
            return TransferResult(ok=True, moved_bytes=moved)

        self.store.begin(operation, timeout_s, apply, done)

    def read(self, attempt: str, pieces: Sequence[Piece], timeout_s: float, done: Done) -> None:
        """Get the record and the blocks, all or none."""
        names = ("partial", "never", "stale", "evicted", "delay", "duplicate")
        operation = StoreOperation(attempt, None, self, pieces, self.store.draw(names))

        def apply() -> TransferResult:
            problem = self._blocked(operation)
            if problem:
                return TransferResult(ok=False, moved_bytes=0, reason=problem)
            name = self.record_name(attempt)
            sealed = self.store.get(name)
            if sealed is None or operation.fault == "evicted":
                return TransferResult(ok=False, moved_bytes=0, reason="the record is missing (-704)")
            if not whole(name, sealed):
                return TransferResult(ok=False, moved_bytes=0, reason="the record is damaged in the pool")
            record = sealed[:-SEAL_BYTES]
            values = [(p, self.store.get(p.key)) for p in pieces]
            if operation.fault == "stale":
                values = [(p, None) for p in pieces]
            moved = 0
            for number, (piece, data) in enumerate(values):
                if operation.fault == "partial" and number >= len(values) // 2:
                    break
                if data is not None:
                    self._land(attempt, piece, data[:-SEAL_BYTES])
                    moved += piece.nbytes
            damaged = [piece.key for piece, data in values if data is not None and not whole(piece.key, data)]
            for key in damaged:
                self.store.remove_damaged(key)
            if damaged:
                reason = f"block {damaged[0]} is damaged in the pool"
                return TransferResult(ok=False, moved_bytes=moved, reason=reason, record=record)
            missing = sum(data is None for _, data in values)
            if missing or operation.fault == "partial":
                reason = f"{missing} blocks are missing (-704)" if missing else "injected: partly read"
                return TransferResult(ok=False, moved_bytes=moved, reason=reason, record=record)
            return TransferResult(ok=True, moved_bytes=moved, record=record)

        self.store.begin(operation, timeout_s, apply, done)

    def fetch(self, attempt: str, pieces: Sequence[Piece], timeout_s: float, done: Done) -> None:
        """Get the longest run of the first blocks that are there."""
        names = ("partial", "never", "stale", "evicted", "delay", "duplicate")
        operation = StoreOperation(attempt, None, self, pieces, self.store.draw(names))

        def apply() -> TransferResult:
            problem = self._blocked(operation)
            if problem:
                return TransferResult(ok=False, moved_bytes=0, reason=problem)
            moved = 0
            for number, piece in enumerate(pieces):
                data = None if operation.fault in ("evicted", "stale") else self.store.get(piece.key)
                if data is None:
                    break
                self._land(attempt, piece, data[:-SEAL_BYTES])
                if operation.fault == "partial" and number >= len(pieces) // 2:
                    return TransferResult(ok=False, moved_bytes=moved, reason="injected: partly read")
                if not whole(piece.key, data):
                    self.store.remove_damaged(piece.key)
                    reason = f"block {piece.key} is damaged in the pool"
                    return TransferResult(ok=False, moved_bytes=moved, reason=reason)
                moved += piece.nbytes
            return TransferResult(ok=True, moved_bytes=moved)

        self.store.begin(operation, timeout_s, apply, done)

    def _blocked(self, operation: StoreOperation) -> str:
        if operation.cancelled:
            return "cancelled"
        if operation.fault == "drop":
            return "injected: dropped"
        return "" if self.store.up else "the master does not answer"

    def _bytes(self, piece: Piece) -> bytes:
        return ctypes.string_at(self._address(piece), piece.nbytes)

    def _land(self, attempt: str, piece: Piece, data: bytes) -> None:
        assert len(data) == piece.nbytes
        if self.on_block_written is not None:
            self.on_block_written(attempt, piece.block_id)
        ctypes.memmove(self._address(piece), data, len(data))

    def _address(self, piece: Piece) -> int:
        assert self._region is not None
        return self._region.base + piece.block_id * self._region.block_stride + piece.offset

    def cancel(self, attempt: str) -> None:
        """Start no further byte. Removes the keys a sender has written for the attempt."""
        for operation in self.store.operations.values():
            mine = operation.source is self or operation.target is self
            if operation.attempt == attempt and mine and operation.fault != "never":
                operation.cancelled = True
        if attempt not in self._reserved:
            self.store.remove_scoped(attempt)

    def drained(self, attempt: str, peer_url: str, peer_epoch: str, done: Callable[[bool], None]) -> None:
        """Whether an operation of this process may still move bytes; peers cannot write here."""

        def answer() -> None:
            moving = any(
                op.attempt == attempt and (op.source is self or op.target is self)
                for op in self.store.operations.values()
            )
            done(not moving)

        self.store.clock.after(LATENCY_S, answer)

    def expect(self, ticket: Ticket) -> None:
        """Nothing is needed of a peer."""

    def forget(self, attempt: str) -> None:
        """The receiver has what it wants: the attempt's own keys go. A sender leaves them for the receiver."""
        if attempt in self._reserved:
            self._reserved.discard(attempt)
            self.store.remove_scoped(attempt)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """The process ends."""
        self.store.forget_process(self)
