"""Engine loop <-> KV handoff: attempts to move one prompt's KV, and what came of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..protocol.calls import CommitCall
from ..protocol.ticket import PrefillRecord, Ticket
from ..request import TokenLogprobs


@dataclass(slots=True)
class BlockRef:
    """A prompt block that is ready to be sent. Never changed; a long prompt has thousands, and frozen ones take three
    times as long to make."""

    index: int
    """Position in the prompt, 0-based, in blocks."""
    block_id: int
    key: str
    """Content key from kv/keys.py."""
    group: int
    """KV group whose layers it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendJob:
    """Prefill side: an attempt to move one prompt's KV."""

    request_id: str
    attempt: str
    ticket: Ticket
    deadline_s: float
    """On the clock that `now` arguments use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveJob:
    """Decode side: an attempt to take one prompt's KV."""

    request_id: str
    attempt: str
    skip_blocks: int
    blocks: tuple[BlockRef, ...]
    """Blocks to fill, by group and index, with the keys they must carry: from prompt block `skip_blocks` on, and of a
    sliding group only what the next token looks back at."""
    num_tokens: int
    peer_url: str
    peer_epoch: str
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchJob:
    """Either side: take from a storage pool what it has of a prompt that is to be computed here."""

    attempt: str
    """Names the fetch; no attempt to move a prompt between engines has this name."""
    blocks: tuple[BlockRef, ...]
    """Full blocks of the prompt, in its order, with the keys they must carry."""
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    """What the engine knows when a prompt is computed. The handoff makes the record of it, from what it moved."""

    num_tokens: int
    """Prompt tokens whose KV was computed."""
    first_token: int
    first_logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Prefill side: everything was sent, the record last."""

    attempt: str
    sent_bytes: int
    seconds: float
    """Since `finish_send`: what was not hidden behind compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """Decode side: everything has arrived and was verified."""

    attempt: str
    record: PrefillRecord
    seconds: float
    """Since `commit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A fetch has come to its end."""

    attempt: str
    blocks: int
    """So many leading blocks of the job are here and whole; of the others nothing is known."""
    problem: str = ""
    """Why it failed; empty: the pool has no more of them."""
    given_up: bool = False
    """Failed not for a fault: nobody wants it any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The KV did not move."""

    attempt: str
    stage: str
    reason: str
    given_up: bool = False
    """Not for a fault: this side or its peer wanted no more of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """The attempt has ended here."""

    attempt: str
    drained: bool
    """False: its blocks must be quarantined until the `Drained` of the same attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """Nothing can move any more for an attempt that was released undrained."""

    attempt: str


HandoffEvent = Sent | Received | Fetched | Failed | Released | Drained
"""What the handoff tells the engine loop. Each attempt gets at most one result (`Sent`, `Received`, `Fetched` or
`Failed`), then exactly one `Released`."""


@dataclass(frozen=True, slots=True)
class HandoffStats:
    """Counters of one handoff, since its start (`live` and `quarantined`: attempts now)."""

    live: int
    quarantined: int
    sent: int
    received: int
    failed: int
    """Those that were given up are none of them."""
    dropped: int
    """Late, repeated or unknown messages."""
    sent_bytes: int


class KvHandoff(Protocol):
    """KV movement as the engine loop sees it. All calls come from the engine thread and return at once;
    results arrive through the `notify` callback given at construction, from any thread."""

    def open_send(self, job: SendJob, now: float) -> None:
        """Start a sending leg. A layout that differs from the ticket's is a `Failed` event naming both."""

    def send_blocks(self, attempt: str, blocks: Sequence[BlockRef], now: float) -> None:
        """These blocks are written and final: move them while the next chunk computes."""

    def finish_send(self, attempt: str, result: PromptResult, now: float) -> None:
        """Write the record, last: all blocks were given."""

    def open_receive(self, job: ReceiveJob, now: float) -> Ticket:
        """Start a receiving leg and describe to the peer where to write."""

    def fetch(self, job: FetchJob, now: float) -> None:
        """Read the longest run of the job's first blocks that the storage pool has, where there is one."""

    def commit(self, call: CommitCall, now: float) -> None:
        """The router's word: prefill has sent, or failed."""

    def cancel(self, attempt: str, reason: str, now: float) -> None:
        """End the attempt from any state; `Released` follows. Unknown attempts are counted and ignored."""

    def tick(self, now: float) -> None:
        """Fire deadlines."""

    def next_deadline(self) -> float | None:
        """When `tick` must be called next, or None."""

    def is_drained(self, attempt: str) -> bool:
        """For a peer: True when no byte of the attempt can still leave this process. Thread-safe."""

    def stats(self) -> HandoffStats:
        """A snapshot of the counters. Thread-safe."""

    def close(self, timeout_s: float) -> None:
        """Stop threads, within `timeout_s`; nothing is started afterwards."""
