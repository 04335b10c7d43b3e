"""What a job may ask for in all: its prompts, its choices and what is told of them together."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidRequest, NeverFits
from ..request import GenerateRequest
from .schema import MAX_COPIED_IDS, MAX_COPIED_TEXT, MAX_ECHO, MAX_SCORES, ChatRequest, CompletionRequest
from .text_prompts import LIMIT


def check_room(name: str, wanted: int | None, prompt: int, limit: int) -> None:
    """Raise NeverFits, naming the parameter `name`, where so many tokens do not fit after a prompt."""
    if wanted is not None and prompt + wanted > limit:
        raise NeverFits(
            f"{name}: {wanted} after a prompt of {prompt} tokens, but {LIMIT} {limit} tokens, "
            f"prompt and output together; ask for at most {limit - prompt}",
            param=name,
        )


def told_scores(request: CompletionRequest | ChatRequest, prompts: Sequence[Sequence[int]]) -> int:
    """How many log-probabilities of prompts the answer will tell. Raises InvalidRequest for too many."""
    each = request.scores_per_token
    if not each:
        return 0
    tokens = sum(map(len, prompts))
    if tokens * each > MAX_SCORES:
        name = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        raise InvalidRequest(
            f"{name}: {each} for each of {tokens} tokens of prompts are more than {MAX_SCORES} log-probabilities; "
            "ask for fewer, or for fewer choices, or send fewer prompts in a request",
            param=name,
        )
    return tokens * each


def check_copies(requests: Sequence[GenerateRequest], structure_param: str) -> None:
    """Each choice is a request of its own to engines, with all that it carries. Raises InvalidRequest."""
    count, first = len(requests), requests[0]
    structure = 0 if first.structure is None else len(first.structure.text)
    carried = (
        ("n", "tokens of prompts", sum(len(one.prompt_token_ids) for one in requests), MAX_COPIED_IDS),
        ("allowed_token_ids", "ids", count * len(first.sampling.allowed_token_ids), MAX_COPIED_IDS // 4),
        (structure_param, "characters", count * structure, MAX_COPIED_TEXT),
    )
    for name, what, found, most in carried:
        if found > most:
            raise InvalidRequest(
                f"{name}: {found} {what} in {count} choices, each of which carries its own, are more than {most}; ask "
                "for fewer choices in a request",
                param=name,
            )


def check_echo(characters: int, n: int) -> None:
    """Raise InvalidRequest where so many characters are repeated in each of `n` choices."""
    if characters * n > MAX_ECHO:
        raise InvalidRequest(
            f"echo: {characters} characters in each of n = {n} choices are more than {MAX_ECHO}; remove echo, or "
            "ask for fewer choices",
            param="echo",
        )
