"""Scheduler -> executor: what one forward pass computes, and what it drew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol, runtime_checkable

from ..errors import RequestError
from ..request import PoolingParams, SamplingParams, TokenLogprobs
from .transport import KvRegion


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
    adapter: int = 0
    """Adapter slot (LoRA) that the row computes with; 0: the base model alone."""
    prompt_logprobs: int = -1
    """-1 off; n >= 0: its chunks tell the log-probabilities of prompt tokens, and of the n likeliest at each."""
    pooling: PoolingParams | None = None
    """The chunk that ends the prompt tells its vector, and draws nothing; None: it does not."""


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Write `block_ids` into the row's block table of `group`, from table index `index` on."""

    row: int
    group: int
    index: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy a whole block, all its layers, before anything of the step is computed."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class AdapterSlot:
    """Have this adapter (LoRA) in `slot`, 1 or more, before anything of the step is computed."""

    slot: int
    name: str
    digest: str
    """Of its weights: a name may be loaded again with others."""


@dataclass(frozen=True, slots=True)
class RowMask:
    """Which token ids a row may draw in this step (structured output)."""

    row: int
    allowed: tuple[bytes, ...]
    """One mask for each draw of the row's chunk, in order: bit `id % 8` of byte `id // 8` is 1 where `id` may be
    drawn. Ids beyond the last byte may not."""


class Later(Enum):
    """An answer that is being worked out."""

    MASK = "the mask is being computed"


@runtime_checkable
class LateMask(Protocol):
    """The mask of a draw whose step is planned before the token ahead of it was seen."""

    def wait(self, patience_s: float) -> bytes | Later | None:
        """The mask (as in `RowMask`), or None: any token, nobody will read it.

        Blocks until the token ahead of it was seen, and `patience_s` longer at most; then Later: the row draws nothing
        in this step. For the executor, once the forward pass runs and before it draws.
        """


@dataclass(frozen=True, slots=True)
class LateRowMask:
    """A row whose mask for its one draw is computed while the forward pass of this step runs."""

    row: int
    mask: LateMask


class Chunk(NamedTuple):
    """Compute positions [start, start + num_tokens) of the row, and draw tokens after its last positions.

    A named tuple, as `RowOutput` is: there is one per row and step, and it costs a third of a frozen dataclass.
    """

    row: int
    start: int
    num_tokens: int
    draws: int
    """Most tokens that are drawn: 0 for a chunk that ends before the last known token, 1 without drafts, else one more
    than there are drafts.

    The executor stores what it draws at the positions from start + num_tokens - len(drafts) on, so the next step's
    chunk may start there before the scheduler has seen it.
    """
    drafts: tuple[int, ...] = ()
    """Guessed tokens to verify. They are the inputs of the last len(drafts) positions; a draw that differs from the
    draft at its position is the row's last."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass for the whole batch. Applied in the order: copies, adapters, starts, grown, chunks.

    An executor fails a step that asks for what it does not have; it never leaves a part out.
    """

    step: int
    starts: tuple[RowStart, ...]
    grown: tuple[RowBlocks, ...]
    chunks: tuple[Chunk, ...]
    num_tokens: int
    copies: tuple[BlockCopy, ...] = ()
    adapters: tuple[AdapterSlot, ...] = ()
    masks: tuple[RowMask, ...] = ()
    late_masks: tuple[LateRowMask, ...] = ()
    """Of rows that are in no `masks`. A plan that has any does not leave this process."""


class RowOutput(NamedTuple):
    """What one chunk drew."""

    tokens: tuple[int, ...]
    """In position order, at most the chunk's `draws`; none where a late mask did not come."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Empty when the row did not ask; else aligned with tokens."""


NOTHING_DRAWN = RowOutput(())


class PromptScores(NamedTuple):
    """Log-probabilities of prompt tokens, from one chunk."""

    chunk: int
    """Its place in the plan."""
    logprobs: tuple[TokenLogprobs, ...]
    """Of the token after each of the chunk's positions, in order, as far as that is a token of the prompt."""


class Pooled(NamedTuple):
    """The vector of a prompt, from the chunk that ends it."""

    chunk: int
    """Its place in the plan."""
    vector: bytes
    """fp32, little-endian."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Result of one StepPlan."""

    step: int
    rows: tuple[RowOutput, ...]
    """One for each chunk of the plan, in its order."""
    scores: tuple[PromptScores, ...] = ()
    """Of chunks whose rows ask for them, in the order of the plan."""
    pooled: tuple[Pooled, ...] = ()
    """Of chunks that end a prompt whose vector is asked for."""


class Forced(NamedTuple):
    """Tokens to which there is no alternative (structured output)."""

    tokens: tuple[int, ...] = ()
    masks: tuple[bytes, ...] = ()
    """The mask (as in `RowMask`) after each of them; empty where nobody asked for them."""


class Outgrown(Exception):
    """A constraint has used up what it walks its grammar with. Asked again after `renew`, it answers."""

    def __init__(self, renew: Callable[[], None]) -> None:
        """`renew` may take seconds, and raises as `Constraint.allowed` does."""
        super().__init__("the constraint has to be renewed")
        self.renew = renew


class Constraint(Protocol):
    """What one request may generate (structured output): a pure function of what it has generated."""

    def allowed(self, generated: Sequence[int]) -> bytes | None:
        """The mask (as in `RowMask`) for the token after these; None: any token.

        Raises the RequestError that ends the request, and Outgrown.
        """

    def forced(self, generated: Sequence[int], most: int) -> Forced:
        """What must follow these, `most` tokens at most, with masks; with `most` = 0 a token at most, without them.

        Asked after `allowed` about the same tokens. Raises as it does.
        """

    @property
    def apart_s(self) -> float:
        """Processor time that it has taken on other threads than those of its callers, about."""

    def lost(self) -> RequestError | None:
        """Why nothing is allowed any more, without looking; None: something may be. Any thread may ask."""


class Masks(Protocol):
    """One request's masks, computed beside whoever asks."""

    def allowed(self, generated: Sequence[int], most: int = 0) -> bytes | Later | None:
        """See `Constraint.allowed`. Later: the work has begun; ask again when woken, and go on without meanwhile.

        `most`: as of `Constraint.forced`, which is asked in the same go.
        """

    def forced(self) -> Forced:
        """What must follow the tokens that `allowed` was asked about last; nothing while that is not known."""

    def late(self, count: int) -> LateMask:
        """The mask for the token after `count` generated ones: it comes once `allowed` was asked about them.

        There is one at a time.
        """

    def drop(self) -> None:
        """Nobody will read what the step with the late mask draws: let it draw any token."""


class Adapter(Protocol):
    """A low-rank adapter (LoRA) that was read and fits the model, in the host's memory."""

    @property
    def digest(self) -> str:
        """Digest of its content: of its settings and its weights."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes of the host's memory."""


class AdapterHolder(Protocol):
    """An executor's adapters in the host's memory, from where steps take them to their slots."""

    def read(self, folder: str) -> Adapter:
        """Read and check the adapter in `folder`, in PEFT's format. Any thread. Raises WeightsError, naming all that is
        wrong with it."""

    def keep(self, adapter: Adapter) -> None:
        """Steps that are submitted from now on may name it. Not again with another of the same digest in between."""

    def drop(self, digest: str) -> None:
        """No step in flight takes it to a slot, and none will."""

    def kept(self) -> Mapping[str, int]:
        """Bytes of those that are kept, by digest. Any thread."""


class Executor(Protocol):
    """Runs steps in submission order, at most a few in flight. Owns the KV tensors."""

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        """Queue a step; returns at once. The future fails only when the executor is broken for good.

        The newest step may be taken back by `Future.cancel`, as long as nothing of it has begun.
        """

    def kv_region(self) -> KvRegion:
        """The pool; valid until close."""

    def close(self) -> None:
        """Stop the thread and free the tensors."""
