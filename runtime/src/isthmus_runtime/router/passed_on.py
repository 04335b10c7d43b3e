"""Prompts that the router passes on as text, for the engine to tokenise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..request import GenerateRequest, PromptText
from .policy import Endpoint, Fleet, PolicyName

_CHARACTERS_A_TOKEN = 4
"""Of most texts, for the load of a prompt that nobody has tokenised yet."""


class NeedsIds(Exception):
    """A prompt that came as text would go to an engine that takes ids alone."""


@dataclass(frozen=True, slots=True)
class OwnTokenizer:
    """The router's."""

    digest: str
    """Engines of the same make the same ids."""
    tokenise: Callable[[PromptText], Sequence[int]]
    """Raises InvalidRequest."""


def takes_text(own: OwnTokenizer | None, policy: PolicyName, engines: Fleet) -> bool:
    """Whether nobody needs the ids of a prompt before an engine has been chosen, and then each engine can make them.

    Engines of an older version cannot: as long as a rollout has both kinds, prompts go by ids.
    """
    if policy.by_prefix or not engines.unified or not engines.decode:
        return False
    return all(takes(own, engine) for engine in engines.decode)


def takes(own: OwnTokenizer | None, engine: Endpoint) -> bool:
    """Whether this engine would make the router's ids of a text."""
    return own is not None and engine.tokenizer == own.digest


def expected_tokens(request: GenerateRequest) -> int:
    """Tokens of its prompt; a guess for text."""
    if request.prompt is None:
        return len(request.prompt_token_ids)
    return len(request.prompt.text) // _CHARACTERS_A_TOKEN + 1
