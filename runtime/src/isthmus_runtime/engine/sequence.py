"""What the scheduler knows of one request, and the effects it asks the loop to carry out. Plain records."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from ..interfaces.handoff import BlockRef, FetchJob, PromptResult, ReceiveJob
from ..interfaces.steps import Masks
from ..request import GenerateRequest, TokenChunk, TokenLogprobs
from .drafters import Drafter, ModelDrafter

FIRST = -(2**31) - 1
"""More urgent than any `priority` of a request."""


class Kind(StrEnum):
    """Where a request's prompt KV is computed and where it goes."""

    LOCAL = "local"
    SEND = "send"
    """Prefill: compute the prompt and one token, move the KV to a peer."""
    RECEIVE = "receive"
    """Decode: the prompt's KV comes from a peer."""


class Phase(StrEnum):
    """Where a live request stands. Each waiting phase has a deadline."""

    WAITING = "waiting"
    """Holds no block and no row."""
    FETCHING = "fetching"
    """Holds blocks into which the beginning of its prompt is read from the storage pool; no row."""
    RECEIVING = "receiving"
    """Holds blocks a peer writes into; no row."""
    UNTOLD = "untold"
    """The KV did not come, and nobody has said yet whether the client has a first token. Holds no block and no row."""
    READY = "ready"
    """KV has arrived; waits for a row."""
    RUNNING = "running"
    SENDING = "sending"
    """Prompt computed; the last bytes are leaving. Blocks are held by reader leases only."""
    ENDED = "ended"
    """No longer live; a step in flight may still name it."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One live request. `scheduled` runs ahead of `written` by what is in flight in the executor."""

    sid: str
    """Scheduler id: the attempt id where there is one, also of a local attempt, else the request id."""
    request: GenerateRequest
    kind: Kind
    arrival_s: float
    deadline_s: float
    queue_deadline_s: float
    end_len: int
    """Total length at which the request ends by length."""
    peak: int
    """Most blocks that it ever holds."""
    tokens: list[int] | tuple[int, ...]
    """Prompt, then generated tokens as they become known. While it waits the prompt itself, which all choices of a
    request may share: of 128 with 32,000 tokens copies take 32 MiB."""
    attempt: str = ""
    peer_url: str = ""
    peer_epoch: str = ""
    skip_blocks: int = 0
    """SEND: leading blocks the peer already has."""
    masks: Masks | None = None
    """What it may generate; None: anything."""
    masks_late_from: int = 0
    """Length from which on it may be planned before its mask is known."""
    masks_rest: int = 0
    """So many tokens it was not, since it last missed a draw."""
    forced_share: float = 0.0
    """How many of its tokens its grammar left no alternative to: a moving average."""
    drafter: Drafter | ModelDrafter | None = None
    """Guesses its next tokens; None: nobody does."""
    holds: bool = False
    """Its next step waits until its newest token was seen, to guess what follows."""
    phase: Phase = Phase.WAITING
    scheduled: int = 0
    """Positions handed to the executor in this run."""
    written: int = 0
    """Positions whose KV is complete in this run."""
    unseen: int = 0
    """Sampled tokens still in flight."""
    void_step: int = 0
    """Steps up to this one computed from a token that was not drawn: their results mean nothing."""
    run: int = 0
    """Counts starts: a step of an earlier run must not advance this one."""
    row: int = -1
    blocks: list[list[int]] = field(default_factory=list)
    """Per group, in position order; 0 where a sliding window does not need the block."""
    room: int = 0
    """Positions that `blocks` covers."""
    trimmed: list[int] = field(default_factory=list)
    """Per group: leading blocks given back."""
    nulled: list[int] = field(default_factory=list)
    """Per group: how many of them the executor's block table shows as null."""
    hashes: list[bytes] = field(default_factory=list)
    """Chain hashes of the full blocks of `tokens`."""
    published: int = 0
    publish_at: int = 0
    """Positions that must be written before there is a block to publish."""
    promised: int = 0
    """Free blocks that admission still keeps for this request."""
    sent_blocks: int = 0
    """SEND: prompt blocks handed to the transfer so far (skipped ones included)."""
    last_step: int = 0
    """Newest step that contains it."""
    fetched: bool = False
    """The storage pool was asked for its prompt, or need not be: it is once."""
    cached_tokens: int = 0
    note: str = "local"
    started: bool = False
    prompt_done_s: float = 0.0
    early: bool = False
    """SEND: begun without decode's ticket; its first token is told as soon as it is known."""
    told: int | None = None
    """RECEIVE: its first token, which the client has from prefill."""
    committed: bool = False
    """RECEIVE: the router has said what became of prefill, and so whether there is such a token."""
    word_by_s: float = 0.0
    """UNTOLD: so long that is waited for."""
    scores: list[TokenLogprobs] | None = None
    """Log-probabilities of the prompt's tokens from the second on, as far as they are known; None: nobody waits for
    them. They survive a preemption."""
    rank: tuple[int, float, str] = field(init=False)
    """Scheduling order: lower goes first, the highest is preempted first."""
    prompt_len: int = field(init=False)
    pools: bool = field(init=False)
    """Its prompt's vector is wanted, and no token."""
    stop_token_ids: tuple[int, ...] = field(init=False)
    adapter: str = field(init=False)
    """Digest of its low-rank adapter; empty: it has none."""

    def __post_init__(self) -> None:
        self.rank = (self.request.priority, self.arrival_s, self.sid)
        self.prompt_len = len(self.request.prompt_token_ids)
        self.pools = self.request.pooling is not None
        self.stop_token_ids = self.request.sampling.stop_token_ids
        self.adapter = "" if self.request.adapter is None else self.request.adapter.digest
        if self.kind is not Kind.RECEIVE:
            self.want_scores()

    def want_scores(self) -> None:
        """The prompt is computed here: with log-probabilities if the request asks for them."""
        if self.request.sampling.prompt_logprobs >= 0:
            self.scores = []

    def scored(self, start: int, found: tuple[TokenLogprobs, ...]) -> None:
        """A chunk from position `start` on has told `found`, of which a recompute may repeat what is known."""
        if self.scores is not None:
            known = len(self.scores)
            assert start <= known, f"{self.sid}: scores from {start} on, known up to {known}"
            self.scores += found[known - start :]

    def take_scores(self) -> tuple[TokenLogprobs, ...]:
        """All of them, once: the prompt is computed."""
        if self.scores is None:
            return ()
        assert len(self.scores) == self.prompt_len - 1, f"{self.sid}: {len(self.scores)} of {self.prompt_len - 1}"
        found, self.scores = tuple(self.scores), None
        return found

    def own(self) -> list[int]:
        """Its tokens, from now on a list of its own."""
        if isinstance(self.tokens, tuple):
            self.tokens = list(self.tokens)
        return self.tokens

    @property
    def fetch(self) -> str:
        """Names its fetch, which may run beside an attempt to send its KV on."""
        return f"{self.sid}/fetch"

    @property
    def known(self) -> int:
        """Positions that have a token, counting those still in flight."""
        return len(self.tokens) + self.unseen

    @property
    def receives(self) -> bool:
        """Whether the prompt's KV comes from a peer in this run; after a preemption it is computed here."""
        return self.kind is Kind.RECEIVE and not self.started


Emit = tuple[str, TokenChunk]
"""(sid, chunk): give this chunk to whoever waits for `sid`. A chunk with a finish reason is the request's one ending.

A plain pair: there is one per row and step, and it costs a fifth of a named tuple.
"""


@dataclass(frozen=True, slots=True)
class OpenReceive:
    """Blocks are reserved: open the receiving leg, then tell the router."""

    job: ReceiveJob


@dataclass(frozen=True, slots=True)
class OpenFetch:
    """Blocks are reserved: read into them what the storage pool has."""

    job: FetchJob


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """These prompt blocks are final: move them now."""

    attempt: str
    blocks: tuple[BlockRef, ...]


@dataclass(frozen=True, slots=True)
class FinishSend:
    """Every block was handed over: write the record last."""

    attempt: str
    result: PromptResult


@dataclass(frozen=True, slots=True)
class CancelAttempt:
    """The request ended for another reason: end its transfer too."""

    attempt: str
    reason: str


Effect = Emit | OpenReceive | OpenFetch | SendBlocks | FinishSend | CancelAttempt


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts for metrics and tests."""

    running: int
    waiting: int
    receiving: int
    sending: int
    preemptions: int
    never_fit: int
    prefix_queries: int
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int
    """Prompt tokens found there."""
    fetching: int
    """Requests whose prompt's beginning is being read from the storage pool."""
    fetch_queries: int
    """Prompt tokens that the storage pool was asked for."""
    fetch_hits: int
    """Prompt tokens that it gave, into the prefix cache."""
    fetch_failures: int
    """Times that it gave nothing, for a fault."""
    recomputes: int
    """Requests whose KV did not arrive and that computed their prompt again."""
    unknown_events: int
    """Late or duplicate handoff events."""
    drafted: int
    """Tokens guessed by speculative decoding."""
    accepted: int
    """How many of them were kept."""
    forced: int
    """Tokens that grammars forced, computed in one step with the token before."""
