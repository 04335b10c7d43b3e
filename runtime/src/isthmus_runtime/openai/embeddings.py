"""POST /v1/embeddings: a vector for each input."""

from __future__ import annotations

import json
import struct
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import isfinite
from os import urandom
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from ..errors import EngineFailed, InvalidRequest
from ..request import GenerateRequest, PoolingParams, SamplingParams, ServedTask, TokenChunk
from ..sharing.threads_in_turns import go_on
from .batches import Batch
from .bodies import hints, json_object, parsed
from .plan import Planner
from .schema import PROMPT, as_prompts

MAX_INPUTS = 2048
"""Of one request, as of OpenAI's."""
MAX_NUMBERS = 1 << 22
"""Most entries of the vectors of one request: about 50 MB of text where they are told."""
_NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType({"add_special_tokens": (True,), "normalize": (True,)})


class EmbeddingsRequest(BaseModel):
    """POST /v1/embeddings."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, json_schema_extra=hints(_NEUTRAL))

    model: str = ""
    """Empty: the one that is served."""
    input: Annotated[Any, WithJsonSchema(PROMPT)]
    """Checked by `as_prompts`."""
    encoding_format: Literal["float", "base64"] = "float"
    """base64: of fp32, little-endian."""
    dimensions: int | None = Field(default=None, ge=1, lt=2**31)
    """How many leading entries a vector keeps, where the model allows it (Matryoshka)."""
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, lt=2**31)
    """Keep the last so many tokens of an input, at least 1; -1: as many as fit."""
    cache_salt: str = Field(default="", max_length=256)
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)


class Embedding(BaseModel):
    """The vector of one input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Text with `encoding_format` base64."""


class PromptUsage(BaseModel):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(BaseModel):
    """Answer of /v1/embeddings, in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PromptUsage


class VectorRequests:
    """Makes requests for vectors of texts."""

    def __init__(self, planner: Planner, timeout_s: float) -> None:
        self._planner = planner
        self._timeout_s = timeout_s

    def of(
        self,
        answer_id: str,
        prompts: Sequence[tuple[int, ...]],
        *,
        dimensions: int = 0,
        priority: int = 0,
        cache_salt: str = "",
    ) -> tuple[GenerateRequest, ...]:
        """One request for each prompt."""
        return tuple(
            GenerateRequest(
                request_id=f"{answer_id}-{number}",
                prompt_token_ids=ids,
                sampling=SamplingParams(max_tokens=1, temperature=0.0),
                priority=priority,
                cache_salt=cache_salt,
                timeout_s=self._timeout_s,
                pooling=PoolingParams(dimensions=dimensions),
            )
            for number, ids in enumerate(prompts)
        )


def plan_embeddings(body: bytes, planner: Planner, vectors: VectorRequests, task: Callable[[], ServedTask]) -> Batch:
    """A body of /v1/embeddings. Raises RequestError."""
    request = parsed(EmbeddingsRequest, json_object(body), _NEUTRAL)
    limit = planner.served.admit(request.model, "embed")
    served = task()
    given = as_prompts(request.input, "input")
    if len(given) > MAX_INPUTS:
        raise InvalidRequest(f"input: {len(given)} inputs, a request may have {MAX_INPUTS}", param="input")
    dimensions = request.dimensions or served.dimensions
    _check_dimensions(request.dimensions, served)
    check_numbers(len(given), dimensions, "input")
    answer_id = "embd-" + urandom(16).hex()
    prompts = [planner.prompt_ids(one, limit, request.truncate_prompt_tokens, "input") for one in given]
    return Batch(
        answer_id=answer_id,
        requests=vectors.of(
            answer_id,
            prompts,
            dimensions=request.dimensions or 0,
            priority=request.priority,
            cache_salt=request.cache_salt,
        ),
        numbers=len(prompts) * dimensions,
        tell=partial(_tell, planner.served.named(request.model), request.encoding_format == "base64"),
    )


def check_numbers(vectors: int, dimensions: int, param: str) -> None:
    """Raise InvalidRequest for more numbers than one request may have made."""
    if vectors * dimensions > MAX_NUMBERS:
        raise InvalidRequest(
            f"{param}: {vectors} vectors of {dimensions} numbers are more than {MAX_NUMBERS} numbers; send several "
            "requests",
            param=param,
        )


def _check_dimensions(asked: int | None, served: ServedTask) -> None:
    if asked in (None, served.dimensions):
        return
    if not served.shorter:
        allowed = f"{served.dimensions}: the model's config.json has neither is_matryoshka nor matryoshka_dimensions"
    elif served.lengths and asked not in served.lengths:
        allowed = ", ".join(map(str, served.lengths))
    elif asked is not None and asked > served.dimensions:
        allowed = f"1 to {served.dimensions}"
    else:
        return
    raise InvalidRequest(f"dimensions: {asked} is not possible; allowed: {allowed}", param="dimensions")


def numbers(chunk: TokenChunk) -> tuple[float, ...]:
    """The entries of a vector. EngineFailed where there is none, or an entry is no number."""
    found = struct.unpack(f"<{len(chunk.vector) // 4}f", chunk.vector)
    if not found or not all(map(isfinite, found)):
        raise EngineFailed(
            "the engine gave no vector" if not found else "the engine gave a vector with NaN or infinity"
        )
    return found


def _tell(model: str, base64: bool, chunks: Sequence[TokenChunk], tokens: int) -> Iterator[bytes]:
    for chunk in chunks:  # a bad one is found before the others are written
        numbers(chunk)
        go_on()
    yield b'{"object":"list","data":['
    for number, chunk in enumerate(chunks):
        # Nine digits are enough for every fp32 number to come back as it was.
        text = (
            f'"{b64encode(chunk.vector).decode()}"' if base64 else f"[{','.join([f'{e:.9g}' for e in numbers(chunk)])}]"
        )
        told = f'{{"object":"embedding","index":{number},"embedding":{text}}}'
        yield f",{told}".encode() if number else told.encode()
    usage = f'{{"prompt_tokens":{tokens},"total_tokens":{tokens}}}'
    yield f'],"model":{json.dumps(model)},"usage":{usage}}}'.encode()
