"""How many log-probabilities, numbers of vectors and tokens of batches a server holds at once, all requests together.

Pure, of one event loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from ..errors import Overloaded
from .embeddings import MAX_NUMBERS
from .ranking import MAX_TOKENS
from .schema import MAX_SCORES

MAX_HELD = 4 * MAX_SCORES
"""About 240 MiB, in an engine as records and here as records and then as text."""
MAX_NUMBERS_HELD = 8 * MAX_NUMBERS
"""128 MiB as vectors, and three times as much beside them where all of them are told as text."""
MAX_TOKENS_HELD = 4 * MAX_TOKENS
"""256 MiB as they wait. On their way to an engine they take 20 bytes each; the memory net stands below."""
MAX_ECHOES, MAX_ECHOES_HELD = 1 << 25, 1 << 27
"""Bytes of prompts that answers repeat, of one request (characters of four bytes, and where its tokens begin) and of
all."""
MAX_KEPT, MAX_KEPT_HELD = 1 << 25, 1 << 27
"""Bytes that requests keep of their bodies: texts that are passed on, structures, what answers repeat."""
_RETRY_AFTER_S = 1.0
_NOTHING = nullcontext[Callable[[], None]](lambda: None)


class ScoreBudget:
    """Of one server. A request that asks for none is never held up."""

    def __init__(self, most: int = MAX_HELD, each: int = MAX_SCORES, of: str = "log-probabilities of prompts") -> None:
        """`most`: at least `each`, what one request may ask for, or the largest would never be served. `of` what."""
        assert most >= each, f"{most} {of} for all requests, but one may ask for {each}"
        self._most = most
        self._of = of
        self._each = each
        self.held = 0
        """By the requests that run."""
        self._of_client: Counter[str] = Counter()

    def holding(self, count: int, who: str = "") -> AbstractContextManager[Callable[[], None]]:
        """Within, a request of `count` scores of a client runs; what it gives is called where they are told before its
        end. Raises Overloaded (429) while others leave no room for them, or this client, where it is known, would leave
        none for the largest request of another."""
        return self._holding(count, who) if count else _NOTHING

    @contextmanager
    def _holding(self, count: int, who: str) -> Iterator[Callable[[], None]]:
        share = max(self._each, self._most - self._each)
        if self.held + count > self._most or (who and self._of_client[who] + count > share):
            raise Overloaded(
                f"{count} {self._of}: requests that run have {self.held}, and all together may have {self._most}, "
                f"those of one client {share}; retry later, or with fewer prompts or alternatives in a request",
                status=429,
                retry_after_s=_RETRY_AFTER_S,
            )
        self.held += count
        self._of_client[who] += count
        left = count

        def told() -> None:
            nonlocal left
            gone, left = left, 0
            self.held -= gone
            self._of_client[who] -= gone
            if not self._of_client[who]:
                del self._of_client[who]

        try:
            yield told
        finally:
            if left:
                told()


def vector_budget() -> ScoreBudget:
    """The same for the numbers of vectors."""
    return ScoreBudget(MAX_NUMBERS_HELD, MAX_NUMBERS, "numbers of vectors")


def token_budget() -> ScoreBudget:
    """The same for the tokens of requests of many or long prompts, which are held until the last one is answered."""
    return ScoreBudget(MAX_TOKENS_HELD, MAX_TOKENS, "tokens of prompts")


def echo_budget() -> ScoreBudget:
    """The same for the prompts that answers repeat, which are held until they are told."""
    return ScoreBudget(MAX_ECHOES_HELD, MAX_ECHOES, "bytes of prompts to repeat (echo)")


def kept_budget() -> ScoreBudget:
    """The same for what is kept of bodies until the answer is complete."""
    return ScoreBudget(MAX_KEPT_HELD, MAX_KEPT, "bytes of texts, structures and what answers repeat")
