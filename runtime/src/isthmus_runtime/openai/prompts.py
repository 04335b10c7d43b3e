"""What an answer tells of its prompt: the prompt itself (`echo`), and the log-probabilities of its tokens."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..request import TokenLogprobs
from .pieces import Pieces

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot carry; first in `max`, also for what is not a number."""


_OF_A_NUMBER = 36
"""Bytes."""


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as its answer repeats it."""

    text: str
    offsets: tuple[int, ...] = ()
    """Where in it each token begins; empty unless log-probabilities are asked for."""

    @property
    def bytes_held(self) -> int:
        """Bytes that it takes, about."""
        wide = 1 if self.text.isascii() else 4
        return wide * len(self.text) + _OF_A_NUMBER * len(self.offsets)


@dataclass(slots=True)
class Told:
    """What the answer of one choice tells of its prompt."""

    ids: Sequence[int]
    echo: Echo | None = None
    scores: Sequence[TokenLogprobs] = ()
    """Of the tokens from the second on, where they are asked for."""


def echo_of_text(text: str, ids: Sequence[int], pieces: Pieces, *, offsets: bool) -> Echo:
    """A prompt that came as text: repeated to the letter. `pieces` show special tokens.

    Tokens may make more text than there was (a token that begins every text, a space before the first word): what is
    too much is before the first character.
    """
    if not offsets:
        return Echo(text)
    begins, length = _begins(ids, pieces)
    return Echo(text, tuple(max(0, begin - (length - len(text))) for begin in begins))


def echo_of_ids(ids: Sequence[int], pieces: Pieces, *, offsets: bool) -> Echo:
    """A prompt that came as ids: what they stand for."""
    return Echo(pieces.join(ids), tuple(_begins(ids, pieces)[0]) if offsets else ())


def _begins(ids: Sequence[int], pieces: Pieces) -> tuple[list[int], int]:
    """Where in the text of `ids` each begins, in characters, and how long that text is."""
    found, length = [], 0
    decoder = getincrementaldecoder("utf-8")(errors="replace")
    for token_id in ids:
        found.append(length)
        length += len(decoder.decode(pieces.of(token_id)))  # a character belongs to the token that ends it
    return found, length + len(decoder.decode(b"", final=True))


def by_token_id(told: Told, pieces: Pieces, most: int) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` as vLLM has them: for each token but the first, the token and the `most` likeliest by id."""
    found: list[dict[str, Any] | None] = [None]
    for entry in told.scores:
        ranked = [(entry.token_id, entry.logprob, entry.rank)]
        ranked += [(token_id, logprob, place) for place, (token_id, logprob) in enumerate(entry.top[:most], 1)]
        values: dict[str, Any] = {}
        for token_id, logprob, rank in ranked:
            shown = {"logprob": max(LOWEST_LOGPROB, logprob), "rank": rank, "decoded_token": pieces.shown(token_id)[0]}
            values.setdefault(str(token_id), shown)
        found.append(values)
    return found
