"""Parameters that change what may be drawn: from words and ids in a body to what the sampler knows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ..errors import InvalidRequest

MAX_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_WORD_TOKENS = 32
"""Each step compares every word with what came before."""
_MAX_BIAS = 100.0
_Word = Annotated[str, Field(min_length=1, max_length=256)]


class LogitOptions(BaseModel):
    """Parameters of both endpoints."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    logit_bias: dict[str, Annotated[float, Field(ge=-_MAX_BIAS, le=_MAX_BIAS, allow_inf_nan=False)]] | None = Field(
        default=None, max_length=MAX_BIASES
    )
    """Token id, as text, to what is added to its logit."""
    # Extensions, with the names that other servers use.
    min_tokens: int | None = Field(default=None, ge=0)
    allowed_token_ids: list[int] | None = Field(default=None, min_length=1, max_length=65_536)
    bad_words: list[_Word] | None = Field(default=None, max_length=MAX_BAD_WORDS)

    @field_validator("logit_bias")
    @classmethod
    def _whole(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or ():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise ValueError(f"logit_bias: {key[:40]!r} is not a token id")
        return value

    def logit_params(
        self,
        encode: Callable[[str], list[int]],
        vocab_size: int,
        *,
        max_tokens: int,
        structured: bool,
        stops: Collection[int] = (),
    ) -> dict[str, Any]:
        """The fields of `SamplingParams`; {} where nothing is given, and all have their defaults.

        `encode` gives the ids of a text alone. `stops`: ids that end the answer.

        Raises InvalidRequest.
        """
        if self.model_fields_set.isdisjoint(_NAMES):
            return {}
        biases = sorted((int(key), bias) for key, bias in (self.logit_bias or {}).items())
        allowed = tuple(sorted(set(self.allowed_token_ids or ())))
        for name, ids in (("logit_bias", [i for i, _ in biases]), ("allowed_token_ids", allowed)):
            outside = [i for i in ids if not 0 <= i < vocab_size]
            if outside:
                raise InvalidRequest(
                    f"{name}: {outside[0]} is not in the vocabulary (0 to {vocab_size - 1})", param=name
                )
        least = self.min_tokens or 0
        if least > max_tokens:
            raise InvalidRequest(
                f"min_tokens: {least} is more than the {max_tokens} tokens that the answer may have", param="min_tokens"
            )
        # Nobody draws an id that the model does not have, though a tokenizer may: Gemma's knows one of images.
        words = {
            ids for word in self.bad_words or () for ids in _spellings(word, encode) if all(i < vocab_size for i in ids)
        }
        if structured:
            # Together with a grammar they could leave no token at all.
            given = {"min_tokens": least, "allowed_token_ids": allowed, "bad_words": words}
            for name, value in given.items():
                if value:
                    raise InvalidRequest(
                        f"{name}: not with structured output, nor with a tool_choice that demands a call; remove one",
                        param=name,
                    )
        left = set(allowed).difference(stops if least else ())
        if left and any(left <= banned for banned in _banned_together(words)):
            raise InvalidRequest(
                "bad_words: where one of them has begun, no token of allowed_token_ids may be left; allow another one",
                param="bad_words",
            )
        if allowed and least and set(allowed) <= set(stops):
            raise InvalidRequest(
                "min_tokens: every token of allowed_token_ids ends the answer; allow another one", param="min_tokens"
            )
        return {
            "min_tokens": least,
            "logit_bias": tuple(dict(biases).items()),
            "allowed_token_ids": allowed,
            "bad_words": tuple(sorted(words)),
        }


_NAMES = frozenset(LogitOptions.model_fields)


def _banned_together(words: Collection[tuple[int, ...]]) -> Iterator[set[int]]:
    """Ids that may be banned at one position, by the longest word whose other tokens stand before it: of the rest those
    are banned whose other tokens are the end of these."""
    for before in {word[:-1] for word in words}:
        ends = {before[at:] for at in range(len(before) + 1)}
        yield {word[-1] for word in words if word[:-1] in ends}


def _spellings(word: str, encode: Callable[[str], list[int]]) -> list[tuple[int, ...]]:
    """A word as it begins a text, and as it follows a space: most tokenisers know two tokens for it."""
    bare = word.lstrip(" ")
    found = [ids for text in (bare, f" {bare}") if (ids := tuple(encode(text)))]
    if (longest := max(map(len, found), default=0)) > MAX_WORD_TOKENS:
        raise InvalidRequest(
            f"bad_words: {word[:40]!r} has {longest} tokens, at most {MAX_WORD_TOKENS} are allowed", param="bad_words"
        )
    return found
