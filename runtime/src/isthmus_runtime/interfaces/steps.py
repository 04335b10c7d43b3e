"""Scheduler -> executor: what one forward pass computes, and what it drew."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from ..request import SamplingParams, TokenLogprobs
from .transport import KvMemory


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


class Executor(Protocol):
    """Runs steps in submission order, at most a few in flight. Owns the KV tensors."""

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        """Queue a step; returns at once. The future fails only when the executor is broken for good."""

    def kv_memory(self) -> KvMemory:
        """The pool; valid until close."""

    def close(self) -> None:
        """Stop the worker thread and free the tensors."""
