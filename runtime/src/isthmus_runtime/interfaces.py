"""Where the parts meet: records and protocols shared by openai, router, engine, executor and transfer.

Those packages do not import one another; `__main__` joins them. Everything here is plain data or a small protocol.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from .protocol import CommitCall, PrefillRecord, Ticket
from .request import GenerateRequest, SamplingParams, TokenChunk, TokenLogprobs

# ----------------------------------------------------------------------------------------- API <-> whatever serves


class Backend(Protocol):
    """Turns requests into tokens: the local engine, or the router's pair of remote ones."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, tokens; 0 while unknown (not ready)."""

    def ready(self) -> str:
        """Empty when requests can be served now, else the one reason why not."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream the answer; the last chunk has a finish reason. Closing the generator cancels the request.

        Raises RequestError when it is refused before the first chunk; afterwards errors arrive as the last chunk.
        """


# ------------------------------------------------------------------------------------------- scheduler -> executor


@dataclass(frozen=True, slots=True)
class RowStart:
    """A request takes a row of the persistent input batch (first run, or again after a preemption or a KV arrival)."""

    row: int
    request_id: str
    token_ids: Sequence[int]
    """Every token known so far: prompt, then generated ones."""
    prompt_len: int
    block_ids: tuple[tuple[int, ...], ...]
    """Per KV group, in position order; 0 is the null block."""
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Write `block_ids` into the row's block table of `group`, from table index `index` on."""

    row: int
    group: int
    index: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute positions [start, start + count) of the row. `samples`: a token is drawn for position start + count.

    The drawn token is stored by the executor at that position of the row, so the next step's chunk may start there
    before the scheduler has seen it.
    """

    row: int
    start: int
    count: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass for the whole batch. Applied in the order: starts, grown, chunks."""

    step: int
    starts: tuple[RowStart, ...]
    grown: tuple[RowBlocks, ...]
    chunks: tuple[Chunk, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Result of one StepPlan: sampled tokens in the order of the chunks with `samples`."""

    step: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """Empty when no row asked; else aligned with token_ids."""


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The KV pool as plain memory, for registration with a transport. One block is one contiguous run."""

    base: int
    """Address of block 0."""
    num_blocks: int
    block_bytes: int
    """Bytes of a block's payload."""
    block_stride: int
    """Bytes between two blocks (>= block_bytes)."""
    layout_digest: str
    device: str = "cpu"


class Executor(Protocol):
    """Runs steps in submission order, at most a few in flight. Owns the KV tensors."""

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        """Queue a step; returns at once. The future fails only when the executor is broken for good."""

    def kv_memory(self) -> KvMemory:
        """The pool; valid until close."""

    def close(self) -> None:
        """Stop the worker thread and free the tensors."""


# -------------------------------------------------------------------------------------- engine loop <-> KV handoff


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A prompt block that is ready to be sent."""

    index: int
    """Position in the prompt, 0-based, in blocks."""
    block_id: int
    key: str
    """Content key from kv/keys.py."""


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
    """Blocks to fill: prompt blocks skip_blocks, skip_blocks + 1, ... with the keys they must carry."""
    num_tokens: int
    peer_url: str
    peer_epoch: str
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    """What the engine knows when a prompt is computed. The handoff makes the record of it, from what it moved."""

    num_tokens: int
    """Prompt tokens whose KV was computed."""
    first_token: int
    first_logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffEvent:
    """What the handoff tells the engine loop. Each attempt gets at most one result, then exactly one `released`."""

    attempt: str
    kind: str
    """`sent` | `received` | `failed` | `released` | `drained`.

    released with drained=False: blocks must be quarantined until the `drained` event of the same attempt.
    """
    drained: bool = True
    record: PrefillRecord | None = None
    """On `received`."""
    stage: str = ""
    reason: str = ""
    """On `failed`."""
    sent_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class HandoffStats:
    """Counters of one handoff, since its start (`live` and `quarantined`: attempts now)."""

    live: int
    quarantined: int
    sent: int
    received: int
    failed: int
    dropped: int
    """Late, repeated or unknown messages."""
    sent_bytes: int


class KvHandoff(Protocol):
    """KV movement as the engine loop sees it. All calls come from the engine thread and return at once;
    results arrive through the `notify` callback given at construction, from any thread."""

    def open_send(self, job: SendJob, now: float) -> None:
        """Start a sending leg. A layout that differs from the ticket's is a `failed` event naming both."""

    def send_blocks(self, attempt: str, blocks: Sequence[BlockRef], now: float) -> None:
        """These blocks are written and final: move them while the next chunk computes."""

    def finish_send(self, attempt: str, result: PromptResult, now: float) -> None:
        """All blocks were given; write the record last."""

    def open_receive(self, job: ReceiveJob, now: float) -> Ticket:
        """Start a receiving leg and describe to the peer where to write."""

    def commit(self, call: CommitCall, now: float) -> None:
        """The router's word: prefill has sent, or failed."""

    def cancel(self, attempt: str, reason: str, now: float) -> None:
        """End the attempt from any state; `released` follows. Unknown attempts are counted and ignored."""

    def tick(self, now: float) -> None:
        """Fire deadlines."""

    def next_deadline(self) -> float | None:
        """When `tick` must be called next, or None."""

    def is_drained(self, attempt: str) -> bool:
        """For a peer: True when no byte of the attempt can still leave this process. Thread-safe."""

    def stats(self) -> HandoffStats:
        """A snapshot of the counters. Thread-safe."""

    def close(self) -> None:
        """Stop threads; nothing moves afterwards."""


# ---------------------------------------------------------------------------------- handoff <-> transport back end


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One block on its way."""

    block_id: int
    key: str
    nbytes: int
    remote_address: int = 0
    """Direct only."""


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

    def prepare(self, memory: KvMemory, timeout_s: float) -> None:
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

    def close(self) -> None:
        """Unregister and stop."""
