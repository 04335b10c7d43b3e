"""A generation request and its answer, as plain records. No behaviour, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from .errors import RequestError


class FinishReason(StrEnum):
    """Why a request ended. Each request gets exactly one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. Resolved before it reaches an engine: nothing here is optional by accident."""

    max_tokens: int
    """Most tokens to generate, >= 1."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means off."""
    min_p: float = 0.0
    seed: int = 0
    """Set by the API layer (from the client, else random), so that prefill, decode and a recompute draw alike."""
    stop_token_ids: tuple[int, ...] = ()
    """Includes the model's end-of-sequence ids unless the client asked to ignore them."""
    logprobs: int = -1
    """-1 off; n >= 0: log-probability of the sampled token and of the n likeliest."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one generated position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt for a Backend. Token ids only: text stays at the API edge."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    """Lower runs first; ties by arrival."""
    cache_salt: str = ""
    """Separates prefix caches of tenants."""
    timeout_s: float = 600.0
    """The whole request must end within this."""


class TokenChunk(NamedTuple):
    """Some new tokens of one request; the last chunk carries `finish_reason`, and `error` if that is ERROR or ABORT.

    A named tuple: there is one per request and step, and it costs a quarter of a frozen dataclass.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: RequestError | None = None
    cached_tokens: int = 0
    """Prompt tokens served from a prefix cache; meaningful on the first chunk."""
    note: str = ""
    """Where the prompt was computed: `local`, `transferred`, `recomputed` (for logs and metrics)."""
