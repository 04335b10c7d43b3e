"""Ids of a prompt that came as text, and what is wrong with it: told alike by whoever tokenises."""

from __future__ import annotations

from ..errors import InvalidRequest, NeverFits
from ..request import PromptText
from .tokenizer import Tokenizer, TooManyTokens

LIMIT = "this model's maximum context length is"
"""Clients that have a way out where a prompt is too long (a model for longer ones, a summary) know the case by these
words, or by those of `too_long`, and not by the error's code."""


def ids_of(
    tokenizer: Tokenizer, text: str, limit: int, name: str = "prompt", *, special: bool = True
) -> tuple[int, ...]:
    """1 to `limit` - 1 ids. `special`: with the tokens that prompts begin with. Errors call the text `name`."""
    try:
        ids = tokenizer.encode(text, limit - 1) if special else tokenizer.encode_alone(text, limit - 1)
    except TooManyTokens as e:
        raise too_long(str(e), limit, name) from e
    if not ids:
        raise InvalidRequest(f"{name}: is empty; give at least one token", param=name)
    return tuple(ids)


def ids_of_passed_on(tokenizer: Tokenizer, prompt: PromptText) -> tuple[int, ...]:
    """`ids_of` for a prompt that was passed on as text."""
    return ids_of(tokenizer, prompt.text, prompt.room, special=prompt.special)


def too_long(size: str, limit: int, param: str) -> NeverFits:
    """The error for a prompt of `size`, in words."""
    return NeverFits(
        f"{param}: the prompt is too long: {size}, but {LIMIT} {limit} tokens, prompt and output together; "
        f"shorten the prompt to {limit - 1} tokens or fewer",
        param=param,
    )
