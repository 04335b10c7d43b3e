"""What all requests of a server may hold together until they are answered (docs/bounds.md). What grows as it is
generated is counted by `untold`."""

from __future__ import annotations

from ..sharing.budget import Budget
from .embeddings import MAX_NUMBERS
from .ranking import MAX_TOKENS
from .schema import MAX_SCORES

MAX_ECHOES = MAX_KEPT = 1 << 25
"""Bytes of one request."""


class Budgets:
    """The budgets of one server."""

    def __init__(self) -> None:
        self.scores = Budget(4 * MAX_SCORES, MAX_SCORES, "log-probabilities of prompts", 1 << 10)
        """About 240 MiB, in an engine as records and here as records and then as text."""
        self.numbers = Budget(8 * MAX_NUMBERS, MAX_NUMBERS, "numbers of vectors", 1 << 14)
        """128 MiB as vectors, and three times as much beside them where all of them are told as text."""
        self.tokens = Budget(4 * MAX_TOKENS, MAX_TOKENS, "tokens of prompts", 1 << 14)
        """256 MiB as they wait, with the ids that a request allows. On their way to an engine they take 20 bytes each;
        the memory net stands below."""
        self.echoes = Budget(4 * MAX_ECHOES, MAX_ECHOES, "bytes of prompts to repeat (echo)", 1 << 16)
        """Characters of four bytes, and where the tokens begin."""
        self.kept = Budget(4 * MAX_KEPT, MAX_KEPT, "bytes of texts, structures and what answers repeat", 1 << 14)
        """Of bodies, until the answer is complete; texts are those that are passed on."""
