"""Answers of the OpenAI routes as types, for the API's own documentation. `sse.py` writes them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(BaseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int


class UsageCounts(BaseModel):
    """Tokens of a whole request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    """One entry of each list for a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """Both null for the first token of a prompt that is repeated."""
    text_offset: list[int]


class PromptLogprob(BaseModel):
    """A token that is in the prompt, or might be in its place."""

    logprob: float
    rank: int
    decoded_token: str


class CompletionChoice(BaseModel):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    """Both only with return_token_ids."""
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    """For each token of the prompt but the first, by token id; only where it is asked for."""


class Completion(BaseModel):
    """Answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageCounts


class TopLogprob(BaseModel):
    """A token that might have come."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The token that came."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities in the order of the text."""

    content: list[TokenLogprob]
    refusal: None


class FunctionCall(BaseModel):
    """What is to be called."""

    name: str
    arguments: str
    """Text of a JSON object."""


class MessageToolCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(BaseModel):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str | None
    """Null where there is nothing but calls."""
    refusal: None
    tool_calls: list[MessageToolCall] | None = None
    reasoning_content: str | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | None = None
    """Only with return_token_ids."""


class Chat(BaseModel):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageCounts
    prompt_token_ids: list[int] | None = None
    """Only with return_token_ids."""
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    """As those of completions."""


class Model(BaseModel):
    """A name that requests may give."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "isthmus"
    parent: str | None = None
    """Of an adapter: the model that it adapts."""
    max_model_len: int | None
    """Tokens of prompt and answer together; until the first engine is known, what the model is made for, or null."""


class ModelList(BaseModel):
    """All models that are served."""

    object: Literal["list"] = "list"
    data: list[Model]
