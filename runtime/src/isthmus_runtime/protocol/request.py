"""A request on the wire: what a router asks of an engine, and how it is written in few microseconds."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from pydantic import Field, TypeAdapter, model_validator

from ..request import AdapterName, GenerateRequest, PoolingParams, PromptText, SamplingParams, Structure, WrittenIds
from .base import Wire

CLIENT_HEADER = "isthmus-client"
"""Names the client of a request for turns, on /internal/generate and /internal/prefill: an engine of an older version
passes it over, where it would refuse a field."""
MOST_OF_A_CLIENT = 64
"""Characters of it."""
MANY_ALLOWED = 256
"""Ids that may be drawn from which they go as a mask."""
MAX_ALLOWED_TEXT = 1 << 18
"""Of a vocabulary of 1.5 million."""


class WireRequest(Wire):
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


def request_parts(request: GenerateRequest) -> Sequence[bytes]:
    """`WireRequest.of(request)` as JSON, at half the cost: both have the same fields. Ids that came as JSON are a part
    by themselves, which all choices of a prompt share.

    What has its default is left out. During a rollout routers call engines of an older version, which refuse a field
    that they do not know: only requests that use a new one must fail there. So no default may change between versions.
    """
    allowed, ids = _allowed(request), request.prompt_token_ids
    if not allowed and isinstance(ids, WrittenIds):
        rest = _REQUEST.to_json(request, exclude_defaults=True, exclude=_AND_IDS)
        return b'{"prompt_token_ids":', ids.json, b",%b" % rest[1:]
    if not allowed:
        return (_REQUEST.to_json(request, exclude_defaults=True, exclude=_ROUTERS_OWN),)
    rest = _REQUEST.to_json(request, exclude_defaults=True, exclude=_AND_ALLOWED)
    return rest[:-1], b',"allowed":"%b"}' % allowed.encode()


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


def may_begin_early(request: GenerateRequest) -> bool:
    """Whether a prompt may be computed before decode has reserved, and its first token be told at once: what comes
    with, or before, the first token is no more than that token."""
    plain = request.structure is None and request.prompt is None and request.pooling is None
    return plain and request.sampling.prompt_logprobs < 0
