"""/tokenize and /detokenize, with the names that vLLM uses."""

from __future__ import annotations

import json
from typing import Any, Protocol

from pydantic import BaseModel

from ..errors import InvalidRequest
from .bodies import json_object
from .schema import ChatRequest, CompletionRequest, chat_request, completion_request
from .tokenizer import Tokenizer

_PART = 1 << 14
MAX_TEXT = 16 << 20
"""Bytes of the text of ids, which may have a hundred times as many as the ids in a body."""


class TokenizeRequest(BaseModel):
    """POST /tokenize: `prompt`, or `messages` with the parameters of a chat."""

    model: str = ""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """Whether a prompt gets the tokens that prompts begin with: it does. A chat has them by its template."""
    return_token_strs: bool | None = None


class Tokenized(BaseModel):
    """Answer of /tokenize."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model: str = ""
    tokens: list[int]


class Detokenized(BaseModel):
    """Answer of /detokenize: the text, special tokens included."""

    prompt: str


def written(answer: BaseModel) -> bytes:
    """An answer as JSON. Lists of millions are written in parts, between which other threads run."""
    parts = (f"{json.dumps(name)}:{_value(value)}" for name, value in answer)
    return f"{{{','.join(parts)}}}".encode()


def _value(value: Any) -> str:
    if not isinstance(value, list):
        return json.dumps(value)
    return f"[{','.join(json.dumps(value[at : at + _PART])[1:-1] for at in range(0, len(value), _PART))}]"


class Tokens(Protocol):
    """Checks a request and tokenises its prompt."""

    def tokens(self, request: ChatRequest | CompletionRequest, *, special: bool) -> list[int]: ...

    def check_model(self, name: str) -> None: ...


def tokenized(body: bytes, planner: Tokens, tokenizer: Tokenizer, limit: int | None) -> Tokenized:
    """Raises InvalidRequest."""
    data = json_object(body)
    flags = {}
    for name in ("add_special_tokens", "return_token_strs"):
        flags[name] = data.pop(name, None)
        if flags[name] not in (None, True, False):
            raise InvalidRequest(f"{name}: must be true or false", param=name)
    if "messages" in data:
        if flags["add_special_tokens"]:
            raise InvalidRequest(
                "add_special_tokens: a chat has those of its template; remove it", param="add_special_tokens"
            )
        request: ChatRequest | CompletionRequest = chat_request(data)
    else:
        request = completion_request(data)
    ids = planner.tokens(request, special=flags["add_special_tokens"] is not False)
    strings = tokenizer.token_strings(ids) if flags["return_token_strs"] else None
    return Tokenized.model_construct(count=len(ids), max_model_len=limit, tokens=ids, token_strs=strings)


def detokenized(body: bytes, planner: Tokens, tokenizer: Tokenizer) -> Detokenized:
    """Raises InvalidRequest."""
    data = json_object(body)
    planner.check_model(str(data.pop("model", None) or ""))
    ids = data.pop("tokens", None)
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in ids):
        raise InvalidRequest(f"tokens: must be a list of ids from 0 to {tokenizer.vocab_size - 1}", param="tokens")
    if data:
        name = min(data)
        raise InvalidRequest(f"{name}: unknown parameter; remove it", param=name)
    pieces = tokenizer.pieces_with(None)
    size = 0
    for i in ids:
        size += len(pieces.of(i))
        if size > MAX_TEXT:
            raise InvalidRequest(f"tokens: their text has more than {MAX_TEXT} bytes; send parts", param="tokens")
    return Detokenized(prompt=pieces.join(ids))
