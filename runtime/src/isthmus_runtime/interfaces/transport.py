"""KV handoff <-> transport back end: the pool as memory, and the pieces that move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..protocol.ticket import Ticket

CLOSE_S = 5.0
"""For the threads of a transport to end: longer than any question to a peer takes."""


@dataclass(frozen=True, slots=True)
class KvRegion:
    """One rank's KV pool as plain memory, for registration with a transport."""

    base: int
    """Address of block 0."""
    num_blocks: int
    block_bytes: int
    """Bytes of a block's payload."""
    block_stride: int
    """Bytes between two blocks (>= block_bytes)."""
    layout_digest: str
    rank: int = 0
    """Whose pool this is, among the ranks of a tensor-parallel engine."""
    device: str = "cpu"
    """As torch spells it: `cpu`, `cuda:0`."""
    in_runs: bool = True
    """Whether a block is one run, as transports move it."""


class Piece(NamedTuple):
    """One block, or a part of it, on its way."""

    block_id: int
    key: str
    nbytes: int
    offset: int = 0
    """Bytes from the start of the block here: a part is what one rank or one group of layers holds of it."""
    remote_address: int = 0
    """Direct only: where the first of its bytes goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferResult:
    """Outcome of one write or read, one code per piece; ok only if every byte is accounted for."""

    ok: bool
    moved_bytes: int
    reason: str = ""
    settled: bool = True
    """False: the transport may still be moving bytes (a timeout is not a drain)."""
    record: bytes | None = None
    """On read with a record requested."""


Done = Callable[[TransferResult], None]


class KvTransfer(Protocol):
    """A transport: `direct`, `store` or `memory`. Calls return at once; `done` comes exactly once, from any thread."""

    def prepare(self, region: KvRegion, timeout_s: float) -> None:
        """Register the pool and connect. Raises ConfigError naming the peer and the fix; never outlives timeout_s."""

    def write(
        self,
        attempt: str,
        ticket: Ticket,
        pieces: Sequence[Piece],
        record: bytes | None,
        timeout_s: float,
        done: Done,
    ) -> None:
        """Move pieces to the peer or pool, then (only if all succeeded) the record."""

    def read(self, attempt: str, pieces: Sequence[Piece], timeout_s: float, done: Done) -> None:
        """Fetch record and pieces (store), or check the record that was written here (direct, memory)."""

    def cancel(self, attempt: str) -> None:
        """Start no further byte of the attempt; remove its request-scoped keys."""

    def drained(self, attempt: str, peer_url: str, peer_epoch: str, done: Callable[[bool], None]) -> None:
        """Ask whether any byte of the attempt may still arrive here; `done(True)` is the drain acknowledgement."""

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Unregister and stop, within `timeout_s`: what has not ended by then stays registered."""
