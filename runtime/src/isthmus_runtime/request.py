"""A generation request and its answer, as plain records. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, ConfigDict, Field

from .errors import RequestError


class FinishReason(StrEnum):
    """Why a request ended. Each request gets exactly one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """What a client may set, and a model's `generation_config.json` where the client does not; then these defaults.

    The one place that knows a parameter's name, type, bounds and default: the API's schema, the records between router
    and engines, and the executor's rows follow from it. What it does is the sampler's (`executor/sampling_rows.py` says
    when it is off). pydantic reads the bounds wherever such a record comes from outside; making one checks nothing.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """0 means greedy."""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31), AfterValidator(lambda k: max(k, 0))] = 0
    """0 means off, as -1 does elsewhere."""
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    """Taken from the logit of every token that was generated before."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    """The same for each time that it was generated."""
    repetition_penalty: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 1.0
    """Divides the logit of every token of prompt and output where it is positive, multiplies it where not
    (arXiv:1909.05858)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(SamplingOptions):
    """How the next token is chosen. Resolved before it reaches an engine: nothing here is optional by accident."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    max_tokens: Annotated[int, Field(ge=1)]
    """Most tokens to generate."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    """Set by the API layer (from the client, else random), so that prefill, decode and a recompute draw alike."""
    stop_token_ids: tuple[int, ...] = ()
    """Includes the model's end-of-sequence ids unless the client asked to ignore them."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Before as many were generated, no token of `stop_token_ids` is drawn."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), each id once."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these are drawn; empty: any."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that are not generated: the last token of one is not drawn after the others."""
    logprobs: Annotated[int, Field(ge=-1, le=100)] = -1
    """-1 off; n >= 0: log-probability of the sampled token and of the n likeliest."""
    prompt_logprobs: Annotated[int, Field(ge=-1, le=100)] = -1
    """The same for each token of the prompt but the first, given those before it."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position. A named tuple: short as JSON, and a prompt has one a token."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), likeliest first; fewer than asked for where fewer may be drawn."""
    rank: int = 0
    """Of the token, 1 for the likeliest; told of prompt tokens, else 0."""


@dataclass(frozen=True, slots=True)
class Structure:
    """What the generated text must be, the whole of it (`structured/compiled.py` compiles it)."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    text: str = ""
    """The schema as JSON; the regular expression; the choices as a JSON list of strings; the grammar in Lark's syntax,
    whose start rule is `start`. Empty for a json_object."""


@dataclass(frozen=True, slots=True)
class AdapterName:
    """A low-rank adapter (LoRA) that a request computes with."""

    name: str
    """As clients call it: for messages."""
    digest: str
    """Of its content, which is what counts: a name may be given to another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """What is wanted of a prompt's embedding. How it is pooled is the model's to say (`models/pooling.py`)."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    dimensions: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """How many leading entries are kept, before the vector is normalised (Matryoshka, arXiv:2205.13147); 0: all."""


TaskKind = Literal["generate", "embed", "score"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTask:
    """What a model is served for."""

    kind: TaskKind = "generate"
    """`embed`: a vector for each prompt; `score`: how well a document answers a query, by the model's "yes" or "no"."""
    dimensions: int = 0
    """Entries of an embedding."""
    shorter: bool = False
    """Whether embeddings may be cut (Matryoshka)."""
    lengths: tuple[int, ...] = ()
    """To these lengths alone; empty: to any."""


GENERATES = ServedTask()


class WrittenIds(tuple[int, ...]):
    """Token ids with the JSON that they came as: to write 300 numbers again takes as long as all else of a request."""

    json: bytes
    """The list, without white space."""

    @cached_property
    def ends(self) -> tuple[int, int]:
        """The least and the largest: each of 128 choices is looked at."""
        return min(self), max(self)

    @staticmethod
    def of(ids: Sequence[int]) -> WrittenIds:
        """`ids`, written once: 3 ms for 100,000."""
        written = WrittenIds(ids)
        written.json = b"[%b]" % ",".join(map(str, ids)).encode()
        return written


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptText:
    """A prompt that whoever runs it is to tokenise, where nobody before needs its ids (ADR 15)."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    text: Annotated[str, Field(min_length=1)]
    special: bool
    """Whether it gets the tokens that prompts begin with; a conversation has those of its template."""
    room: Annotated[int, Field(ge=2)]
    """Tokens that prompt and answer may have together: `max_tokens` is cut to what the prompt leaves of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt for a Backend, by token ids. Routers pass on some prompts as text; the core of an engine never sees
    one."""

    request_id: str
    prompt_token_ids: tuple[int, ...] = ()
    """Empty where `prompt` has the text."""
    sampling: SamplingParams
    priority: int = 0
    """Lower runs first; ties by arrival."""
    cache_salt: str = ""
    """Separates prefix caches of tenants."""
    timeout_s: float = 600.0
    """The whole request must end within this."""
    structure: Structure | None = None
    """None: any text."""
    adapter: AdapterName | None = None
    """None: the model as it is."""
    pooling: PoolingParams | None = None
    """Instead of tokens, one vector; None: tokens. Nothing is drawn then, whatever `sampling` says."""
    prompt_group: str = ""
    """Shared by requests that differ in nothing but how they are drawn, the first of which has its first token before
    the others begin. Where it ran is where the prompt's KV is; only routers look at it."""
    prompt: PromptText | None = None
    """Instead of ids; None: ids are there."""
    client: str = ""
    """Who takes turns with others at what is slow: a name of letters and digits for a tenant or an address. "": not
    said, as by routers of older versions. Engines get it beside the request (`protocol.request.CLIENT_HEADER`)."""

    @property
    def whose(self) -> str:
        """The client, or a salt where nothing better is known."""
        return self.client or self.cache_salt


def tokenised(request: GenerateRequest, ids: Iterable[int]) -> GenerateRequest:
    """`request`, whose prompt is text, by the ids of that text."""
    assert request.prompt is not None
    found = tuple(ids)
    most = max(1, min(request.sampling.max_tokens, request.prompt.room - len(found)))
    sampling = replace(request.sampling, max_tokens=most)
    return replace(request, prompt_token_ids=found, sampling=sampling, prompt=None)


class TokenChunk(NamedTuple):
    """Some new tokens of one request; the last chunk carries `finish_reason`, and `error` if that is ERROR or ABORT.

    A named tuple: there is one per request and step, and it costs a quarter of a frozen dataclass.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: RequestError | None = None
    cached_tokens: int = 0
    """Prompt tokens served from a prefix cache, of whichever engine had more; meaningful on the first chunk."""
    note: str = ""
    """Where the prompt was computed: `local`, `transferred`, `recomputed` (for logs and metrics)."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's tokens from the second on, where the request asks for them; on the first chunk."""
    vector: bytes = b""
    """fp32, little-endian: the embedding, on the one chunk of a request with `pooling`."""
    prompt_tokens: int = 0
    """How many the prompt has, where it came as text; on the first chunk."""
