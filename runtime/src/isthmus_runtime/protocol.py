"""Wire records between router, prefill and decode. JSON over HTTP/1.1; token streams are NDJSON lines.

| call | from -> to | body -> answer |
|---|---|---|
| GET  /info              | router -> engine  | EngineInfo |
| POST /internal/generate | router -> decode  | GenerateCall -> reserved line (with an attempt), token lines |
| POST /internal/prefill  | router -> prefill | PrefillCall -> PrefillAnswer, or lines where the ticket is to follow |
| POST /internal/ticket   | router -> prefill | TicketCall -> {} : of a prompt that was begun without |
| POST /internal/commit   | router -> decode  | CommitCall -> {} : prefill has sent everything, or has failed |
| POST /internal/abort    | router -> engine  | AbortCall -> {} : idempotent, unknown ids are ignored |
| POST /internal/adapter  | router -> engine  | AdapterCall -> {} : load or unload one |
| GET  /internal/drained  | decode -> prefill | ?attempt= -> DrainAnswer : may a byte of this attempt still move? |
| GET  /internal/kv-events | router -> engine | KvEvents lines, the first a snapshot, without end |

A prefill call without a ticket is answered in lines: an empty chunk when the ticket may come, the first token unless it
is the last, and `sent_line` or a chunk with the error. Closing the connection of a generate or prefill call cancels it.
An attempt id is in every message. Peer addresses come only from the router in these records, never from a client.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import replace
from functools import cache, lru_cache
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    model_serializer,
    model_validator,
)

from .errors import RequestError, error_from_json
from .request import (
    GENERATES,
    AdapterName,
    FinishReason,
    GenerateRequest,
    PoolingParams,
    PromptText,
    SamplingParams,
    ServedTask,
    Structure,
    TokenChunk,
    TokenLogprobs,
    WrittenIds,
)
from .score_wire import read_scores, read_with_scores, write_scores

KV_ABI = 3
"""Engine KV ABI; part of the fingerprint. Raise it when bytes in a block or in the pool, or the records between
engines, change meaning."""


ATTEMPT = r"^[!-~]{0,128}$"
"""An attempt's name is part of a line where processes greet each other."""
SESSION = r"^[!-~]{0,261}$"
GREETING = r"^([!-~]{1,255}:[0-9]{1,5}(/[!-~]{1,128})?)?$"
MAPPING = r"^([0-9a-f-]{36}/[0-9a-f]{32}/[0-9a-f]{128}/[0-9]{1,20}/[0-9]{1,20})?$"
_Word = Annotated[int, Field(ge=0, lt=2**64)]
"""An address or a size in a peer's memory."""
PEER_URL = r"^(http://([0-9]{1,3}(\.[0-9]{1,3}){3}|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5})?$"
"""An engine's address as discovery makes it: an IP address and a port, no name, no path, no user."""


CLIENT_HEADER = "isthmus-client"
"""Names the client of a request for turns, on /internal/generate and /internal/prefill: an engine of an older version
passes it over, where it would refuse a field."""
MOST_OF_A_CLIENT = 64
"""Characters of it."""
MANY_ALLOWED = 256
"""Ids that may be drawn from which they go as a mask."""
MAX_ALLOWED_TEXT = 1 << 18
"""Of a vocabulary of 1.5 million."""


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WireRequest(_Wire):
    """`GenerateRequest` on the wire."""

    request_id: str = Field(min_length=1, max_length=128)
    prompt_token_ids: tuple[int, ...] = Field(default=(), min_length=1)
    sampling: SamplingParams
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    cache_salt: str = ""
    timeout_s: float = Field(default=600.0, gt=0, le=366 * 86400, allow_inf_nan=False)
    structure: Structure | None = None
    adapter: AdapterName | None = None
    pooling: PoolingParams | None = None
    prompt: PromptText | None = None
    """Instead of ids; only for engines that say that they tokenise as the router does (`EngineInfo.tokenizer`)."""
    allowed: str = Field(default="", max_length=MAX_ALLOWED_TEXT)
    """`sampling.allowed_token_ids` where these are many: a bit for each id, the first one the lowest, in base64. Each
    of 128 choices carries them."""

    @model_validator(mode="after")
    def _check(self) -> WireRequest:
        if bool(self.prompt_token_ids) == (self.prompt is not None):
            raise ValueError("give prompt_token_ids or prompt, and not both")
        if self.allowed and (self.sampling.allowed_token_ids or not ids_of_mask(self.allowed)):
            raise ValueError("allowed must name an id, and sampling.allowed_token_ids be empty beside it")
        return self

    def to_request(self) -> GenerateRequest:
        """The plain record the engine works with."""
        return GenerateRequest(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            sampling=replace(self.sampling, allowed_token_ids=ids_of_mask(self.allowed))
            if self.allowed
            else self.sampling,
            priority=self.priority,
            cache_salt=self.cache_salt,
            timeout_s=self.timeout_s,
            structure=self.structure,
            adapter=self.adapter,
            pooling=self.pooling,
            prompt=self.prompt,
        )

    @staticmethod
    def of(request: GenerateRequest) -> WireRequest:
        """Inverse of `to_request`."""
        allowed = _allowed(request)
        ids = {"prompt_token_ids": request.prompt_token_ids} if request.prompt is None else {}
        return WireRequest(
            request_id=request.request_id,
            **ids,
            sampling=replace(request.sampling, allowed_token_ids=()) if allowed else request.sampling,
            allowed=allowed,
            priority=request.priority,
            cache_salt=request.cache_salt,
            timeout_s=request.timeout_s,
            structure=request.structure,
            adapter=request.adapter,
            pooling=request.pooling,
            prompt=request.prompt,
        )


_REQUEST = TypeAdapter(GenerateRequest).serializer
_ROUTERS_OWN = {"prompt_group": True, "client": True}
_AND_IDS = {**_ROUTERS_OWN, "prompt_token_ids": True}
_AND_ALLOWED: Any = {**_ROUTERS_OWN, "sampling": {"allowed_token_ids"}}


def request_json(request: GenerateRequest) -> bytes:
    """`WireRequest.of(request)` as JSON, at half the cost: both have the same fields.

    What has its default is left out. During a rollout routers call engines of an older version, which refuse a field
    that they do not know: only requests that use a new one must fail there. So no default may change between versions.
    """
    allowed, ids = _allowed(request), request.prompt_token_ids
    if not allowed and isinstance(ids, WrittenIds):
        rest = _REQUEST.to_json(request, exclude_defaults=True, exclude=_AND_IDS)
        return b'{"prompt_token_ids":%b,%b' % (ids.json, rest[1:])
    if not allowed:
        return _REQUEST.to_json(request, exclude_defaults=True, exclude=_ROUTERS_OWN)
    return b'%b,"allowed":"%b"}' % (
        _REQUEST.to_json(request, exclude_defaults=True, exclude=_AND_ALLOWED)[:-1],
        allowed.encode(),
    )


def _allowed(request: GenerateRequest) -> str:
    ids = request.sampling.allowed_token_ids
    return mask_of_ids(ids) if len(ids) > MANY_ALLOWED else ""


@lru_cache(8)
def mask_of_ids(ids: tuple[int, ...]) -> str:
    """Ids as a bit each, in base64. Kept: all choices of a request have the same."""
    bits = bytearray(max(ids) // 8 + 1)
    for i in ids:
        bits[i >> 3] |= 1 << (i & 7)
    return b64encode(bits).decode()


@lru_cache(8)
def ids_of_mask(mask: str) -> tuple[int, ...]:
    """Inverse of `mask_of_ids`, in rising order; one tuple for all that ask for the same, of numbers that all share: an
    id takes 8 bytes, and 36 otherwise. ValueError for other text."""
    raw = b64decode(mask, validate=True)
    shared = _numbers()
    ids = (8 * at + bit for at, byte in enumerate(raw) if byte for bit in _BITS[byte])
    return tuple(shared[i] if i < _SHARED else i for i in ids)


_SHARED = 1 << 18
"""As many numbers are kept for that, 9 MB, from the first request on that allows many: of most vocabularies all."""


@cache
def _numbers() -> tuple[int, ...]:
    return tuple(range(_SHARED))


_BITS = tuple(tuple(bit for bit in range(8) if byte >> bit & 1) for byte in range(256))


class _Reading(_Wire):
    """What an engine tells of itself. A router reads it before it knows the engine's version, and passes over what it
    has no name for: an engine that is newer serves as well."""

    model_config = ConfigDict(extra="ignore")


class KvInfo(_Reading):
    """KV numbers of one engine, both counts named (kv.md)."""

    block_size: int
    physical_blocks: int
    usable_blocks: int
    bytes_per_block: int
    max_model_len: int
    layout_digest: str


class TransferInfo(_Reading):
    """What this engine really moves KV with."""

    mode: Literal["none", "direct", "store", "memory"] = "none"
    transport: str = ""
    """Effective transport as probed, for example `tcp`."""
    probed_gbps: float = 0.0
    """GB/s of the probe; 0 when not probed."""
    epoch: str = ""
    """Changes with each start of the process: a peer with a new epoch cannot write into old blocks."""
    ready: bool = True
    reason: str = ""


class LoadInfo(_Reading):
    """What an engine does and has done since its start (a new `transfer.epoch`)."""

    kv_usage: float = 0.0
    """Share of usable KV blocks in use, 0 to 1."""
    generated_tokens: int = 0
    sent_bytes: int = 0
    """KV bytes sent to peers."""


class AdapterInfo(_Reading):
    """A low-rank adapter that an engine has."""

    name: str
    digest: str


class AdapterProblemInfo(_Reading):
    """Why an adapter is not as --lora-file says. `name` empty: it is about the file itself."""

    name: str
    problem: str


class AdapterListInfo(_Reading):
    """What --lora-file has come to."""

    digest: str
    """The first 16 hex digits of SHA-256 of the file that was understood last; empty: none was."""
    listed: int = 0
    """Adapters in it."""
    problems: tuple[AdapterProblemInfo, ...] = ()


class EngineInfo(_Reading):
    """Answer of GET /info. The router pairs only engines of equal `fingerprint`."""

    role: Literal["prefill", "decode", "unified"]
    model: str
    served_names: tuple[str, ...]
    fingerprint: str
    kv: KvInfo
    transfer: TransferInfo
    version: str
    running: int = 0
    waiting: int = 0
    load: LoadInfo = LoadInfo()
    draining: bool = False
    adapters: tuple[AdapterInfo, ...] = ()
    adapter_list: AdapterListInfo | None = None
    """None: it has no --lora-file."""
    vocab_size: int = 0
    task: ServedTask = GENERATES
    rank_sums: str = ""
    """How the ranks of a tensor-parallel engine sum: `peer`, by memory of each other over NVLink, or the library's
    name, `nccl` or `gloo`. Empty: it has one rank."""
    model_revision: str = ""
    """What exactly is served, as `checkpoints.provenance.pinned_revision` finds it; empty where that is not known."""
    tokenizer: str = ""
    """Digest of the tokenizer by which it takes prompts as text; empty: it takes ids alone."""
    begins_early: bool = False
    """It takes prompts before their tickets (prefill), and commits that tell the first token (decode)."""


class ReservedBlocks(_Wire):
    """Decode's blocks for a run of neighbouring prompt blocks of one KV group."""

    group: int = Field(ge=0, lt=2**31)
    first: int = Field(ge=0, lt=2**31)
    """Prompt block index, 0-based, that the first of `block_ids` is for."""
    block_ids: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...]


class Ticket(_Wire):
    """What decode tells prefill, through the router, so that prefill can send. Opaque to the router."""

    mode: Literal["direct", "store", "memory"]
    attempt: str = Field(pattern=ATTEMPT)
    layout_digest: str
    skip_blocks: int = Field(default=0, ge=0, lt=2**31)
    """Leading full blocks decode already has in its own prefix cache: not sent."""
    peer_epoch: str = ""
    """The prefill process that may write. One that was started since then knows of no drain it acknowledged before,
    and refuses. Empty: not checked."""
    session: str = Field(default="", pattern=SESSION)
    """Direct: TransferEngine peer id `host:port`."""
    greeting: str = Field(default="", pattern=GREETING)
    """Direct: `host:port/WORD`. The process that reserved says its epoch there to whoever says the word, its signature
    of this ticket (transfer/tickets.py)."""
    epoch: str = ""
    """Direct: of the process that reserved. Nothing is written to another one at the same address."""
    pool_base: _Word = 0
    """Direct: address of block 0 of decode's pool."""
    block_stride: _Word = 0
    """Direct: bytes between two blocks."""
    blocks: tuple[ReservedBlocks, ...] = ()
    """Direct: of each KV group, the prompt blocks that decode takes: from skip_blocks on, and of a sliding group only
    what the next token looks back at."""
    record_address: _Word = 0
    record_capacity: _Word = 0
    """Direct: where the record is written, last, and how many bytes it may take."""
    mapping: str = Field(default="", pattern=MAPPING)
    """Direct over NVLink: how processes of the host map decode's pool (transfer/peer_memory.py). Empty: it is not, and
    is not written: engines and routers of an older version refuse a field that they do not know, and the signature is
    of what is written."""

    @model_serializer(mode="wrap")
    def _known_to_older(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        written: dict[str, object] = write(self)
        if not self.mapping:
            written.pop("mapping", None)
        return written


class PrefillRecord(_Wire):
    """Written last by prefill; decode starts only when it verifies."""

    attempt: str
    num_tokens: int
    """Prompt tokens whose KV was written."""
    first_token: int
    first_logprobs: tuple[int, float, tuple[tuple[int, float], ...]] | None = None
    """(token id, logprob, top) of the first token when logprobs were asked for."""
    key_digest: str
    """Hex digest over the ordered block keys (kv/keys.py)."""
    block_bytes: int
    crc: int | None = None
    """CRC-32 over the blocks, with `--transfer-crc`, where the transport does not seal each block."""


class GenerateCall(_Wire):
    """Run a request on decode or unified; with `attempt` set its KV comes from a prefill peer."""

    request: WireRequest
    attempt: str = Field(default="", pattern=ATTEMPT)
    """Empty: compute the prompt locally."""
    local_attempt: str = ""
    """Without `attempt`, this attempt's name: an abort of an earlier one, which comes late, must not end it."""
    prefill_url: str = Field(default="", pattern=PEER_URL)
    """Peer to ask for the drain acknowledgement; from the router's discovery only."""
    prefill_epoch: str = ""


class PrefillCall(_Wire):
    """Compute the prompt, send KV as `ticket` says."""

    request: WireRequest
    attempt: str = Field(min_length=1, pattern=ATTEMPT)
    ticket: Ticket | None = None
    """None: a TicketCall brings it, once decode has reserved. For requests that `may_begin_early`."""


class TicketCall(_Wire):
    """What a prompt that was begun without its ticket has been waiting for. Ignored where that has ended."""

    ticket: Ticket


class PrefillAnswer(_Wire):
    """Everything was sent, the record last."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    attempt: str
    num_tokens: int
    cached_tokens: int = 0
    sent_bytes: int = 0
    transfer_s: float = 0.0
    """Seconds between the end of the prompt's computation and the record's write: what was not hidden."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's tokens from the second on, where the request asks for them: the router has them before decode
    may start, so they need no room in the record."""


class CommitCall(_Wire):
    """The router's word about the prefill leg."""

    request_id: str
    attempt: str
    ok: bool
    stage: str = ""
    reason: str = ""
    first_token: int | None = Field(default=None, ge=0)
    """The client has it already, from prefill: should the KV not come, decode goes on from it. None: nothing was told,
    and nothing is written, for engines of an older version."""


class AbortCall(_Wire):
    """End one attempt at a request, wherever it is; with an empty `attempt` the request."""

    request_id: str
    attempt: str = ""


class AdapterCall(_Wire):
    """Have an adapter, or have it no more."""

    name: str = Field(min_length=1, max_length=256)
    path: str | None = Field(default=None, max_length=4096)
    """In the engine's folder of adapters; None: unload it."""
    replace: bool = False


class DrainAnswer(_Wire):
    """True: no byte of the attempt can still move, now or later."""

    attempt: str
    drained: bool
    epoch: str


class KvEvents(_Wire):
    """Changes of an engine's prefix cache. The first line, and one after a gap, begins a snapshot."""

    previous: int
    """Changes before this line: where the last line ended, unless `reset`."""
    following: int
    """Changes up to and including this line. Equal to `previous` within a snapshot."""
    reset: bool = False
    """Forget everything known; this line and the next ones with `following` == `previous` are the snapshot."""
    changes: tuple[str, ...] = ()
    """In order: `+` a block became a hit, `-` it no longer is one; then the first 8 bytes of its hash in hex."""


def reserved_line(ticket: Ticket) -> bytes:
    """First line of a decode stream whose KV comes from a peer."""
    return b'{"reserved":' + ticket.model_dump_json().encode() + b"}\n"


def token_line(chunk: TokenChunk) -> bytes:
    """One `TokenChunk` as an NDJSON line. Short keys: this is the hot path."""
    body: dict[str, object] = {"t": chunk.token_ids}
    if chunk.logprobs:
        body["l"] = [(p.token_id, p.logprob, p.top) for p in chunk.logprobs]
    if chunk.cached_tokens:
        body["c"] = chunk.cached_tokens
    if chunk.note:
        body["n"] = chunk.note
    if chunk.vector:
        body["v"] = b64encode(chunk.vector).decode()
    if chunk.prompt_tokens:
        body["m"] = chunk.prompt_tokens
    if chunk.finish_reason is not None:
        body["f"] = chunk.finish_reason.value
    if chunk.error is not None:
        body["e"] = {"status": chunk.error.status, **chunk.error.to_json()}
    line = json.dumps(body, separators=(",", ":")).encode() + b"\n"
    # First, so that no text comes before them.
    return b'{"p":%b,%b' % (write_scores(chunk.prompt_logprobs), line[1:]) if chunk.prompt_logprobs else line


def parse_line(line: bytes) -> Ticket | TokenChunk:
    """Inverse of `reserved_line` and `token_line`. Raises ValueError on anything else."""
    body, scores = read_with_scores(line, "p")
    if not isinstance(body, dict):
        raise ValueError(f"stream line is {type(body).__name__}, expected an object")
    if "reserved" in body:
        return Ticket.model_validate(body["reserved"])
    error: RequestError | None = None
    if (raw := body.get("e")) is not None:
        error = error_from_json(int(raw.get("status", 500)), raw)
    return TokenChunk(
        token_ids=tuple(body["t"]),
        logprobs=tuple(read_scores(body["l"])) if "l" in body else (),
        finish_reason=FinishReason(body["f"]) if "f" in body else None,
        error=error,
        cached_tokens=body.get("c", 0),
        note=body.get("n", ""),
        prompt_logprobs=scores,
        vector=b64decode(body["v"], validate=True) if "v" in body else b"",
        prompt_tokens=body.get("m", 0),
    )


def may_begin_early(request: GenerateRequest) -> bool:
    """Whether a prompt may be computed before decode has reserved, and its first token be told at once: what comes
    with, or before, the first token is no more than that token."""
    plain = request.structure is None and request.prompt is None and request.pooling is None
    return plain and request.sampling.prompt_logprobs < 0


def prefill_answer_json(answer: PrefillAnswer) -> bytes:
    """A `PrefillAnswer` as JSON. Routers of an older version refuse a field that they do not know: one is there only
    for who asks for it."""
    plain = answer.model_dump_json(exclude_defaults=True, exclude={"prompt_logprobs"}).encode()
    if not answer.prompt_logprobs:
        return plain
    return b'{"prompt_logprobs":%b,%b' % (write_scores(answer.prompt_logprobs), plain[1:])


def parse_prefill_answer(raw: bytes) -> PrefillAnswer:
    """Inverse of `prefill_answer_json`. Raises ValueError on anything else."""
    try:
        body, scores = read_with_scores(raw, "prompt_logprobs")
    except TypeError as e:
        raise ValueError(f"prompt_logprobs: {e}") from e
    if not isinstance(body, dict):
        raise ValueError(f"the answer is {type(body).__name__}, expected an object")
    return PrefillAnswer.model_validate(body).model_copy(update={"prompt_logprobs": scores})


_SENT = b'{"sent":'


def sent_line(answer: PrefillAnswer) -> bytes:
    """The last line of a prompt that was begun without its ticket."""
    return b"%b%b}\n" % (_SENT, prefill_answer_json(answer))


def parse_prefill_line(line: bytes) -> TokenChunk | PrefillAnswer:
    """Inverse of `sent_line` and, for what comes before it, of `token_line`. Raises ValueError on anything else."""
    if line.startswith(_SENT):
        return parse_prefill_answer(line.strip()[len(_SENT) : -1])
    found = parse_line(line)
    if isinstance(found, Ticket):
        raise ValueError("a ticket among a prefill engine's lines")
    return found
