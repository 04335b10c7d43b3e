"""What a back end offers `TransferAgent` beyond `interfaces.transport.KvTransfer`: tickets, cleanup, measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..interfaces.handoff import ReceiveJob
from ..interfaces.transport import Done, KvTransfer, Piece
from ..protocol.ticket import Ticket


@dataclass(frozen=True, slots=True)
class Effective:
    """The transport that really moves bytes, as found at `prepare`."""

    transport: str
    gbps: float
    """GB/s of the loopback probe; 0 when not probed."""


class TransferBackend(KvTransfer, Protocol):
    """A transport as the agent uses it.

    `drained` with an empty `peer_url` asks about this process alone: may a byte of the attempt still move because of
    an operation started here? Callbacks are never called while the back end holds a lock.
    """

    @property
    def peer_writes(self) -> bool:
        """True: the sender writes into the receiver's memory. False: the receiver fetches."""

    @property
    def seals_blocks(self) -> bool:
        """Each block is checked on its own when it is read: a checksum in the record would refuse blocks that another
        process wrote under the same keys."""

    def reserve(self, job: ReceiveJob, layout_digest: str) -> Ticket:
        """Describe where to write. Raises Overloaded when no record slot is free."""

    def fetch(self, attempt: str, pieces: Sequence[Piece], timeout_s: float, done: Done) -> None:
        """Read the longest run of the first pieces that lies in a storage pool and is whole; `moved_bytes` says how
        much that is. Without a pool it is nothing."""

    def expect(self, ticket: Ticket) -> None:
        """Writes for this ticket will follow: what they need of the peer may be found out now."""

    def forget(self, attempt: str) -> None:
        """The attempt is over and drained: free its record slot, remove its request-scoped keys."""

    def effective(self) -> Effective:
        """What it really moves KV with, for `/info`; valid after `prepare`."""
