"""How many log-probabilities, numbers of vectors and tokens of batches a server holds at once, all requests together.

Pure, of one event loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

from ..errors import Overloaded, RequestError
from ..sharing.giving_way import Held, who_gives_way
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
End = Callable[[RequestError], None]
"""Ends a request with an error."""


@dataclass(frozen=True, eq=False, slots=True)
class _Holding:
    who: str
    count: int
    end: End | None


class ScoreBudget:
    """Of one server. A request that asks for none is never held up."""

    def __init__(self, most: int = MAX_HELD, each: int = MAX_SCORES, of: str = "log-probabilities of prompts") -> None:
        """`most`: at least `each`, what one request may ask for, or the largest would never be served. `of` what."""
        assert most >= each, f"{most} {of} for all requests, but one may ask for {each}"
        self._most = most
        self._of = of
        self._share = max(each, most - each)
        self.held = 0
        """By the requests that run."""
        self._of_client: Counter[str] = Counter()
        self._running: set[_Holding] = set()

    def holding(self, count: int, who: str = "", end: End | None = None) -> AbstractContextManager[Callable[[], None]]:
        """Within, a request of `count` scores of a client runs; what it gives is called where they are told before its
        end. Where there is no room, the largest request of the client that has most ends (429, by its `end`). Raises
        Overloaded (429) where that would be this one's client, or it would leave none for the largest request of
        another."""
        return self._holding(count, who, end) if count else _NOTHING

    @contextmanager
    def _holding(self, count: int, who: str, end: End | None) -> Iterator[Callable[[], None]]:
        one = _Holding(who, count, end)
        self._make_room(one)
        self._running.add(one)
        self.held += count
        self._of_client[who] += count
        let_go = partial(self._let_go, one)
        try:
            yield let_go
        finally:
            let_go()

    def _make_room(self, new: _Holding) -> None:
        if new.who and self._of_client[new.who] + new.count > self._share:
            raise self._too_many(new)
        excess = self.held + new.count - self._most
        if excess <= 0:
            return
        # A little more than it is: of two clients that have as much the one that comes is refused.
        held = [Held(one.who, 2 * one.count, one) for one in self._running if one.end is not None]
        gone = who_gives_way([*held, Held(new.who, 2 * new.count + 1, new)], 2 * excess)
        if any(one.client == new.who for one in gone) or sum(one.size for one in gone) < 2 * excess:
            raise self._too_many(new)
        for one in gone:
            self._let_go(one.what)
            assert one.what.end is not None
            one.what.end(self._too_many(one.what))

    def _let_go(self, one: _Holding) -> None:
        if one not in self._running:
            return
        self._running.remove(one)
        self.held -= one.count
        self._of_client[one.who] -= one.count
        if not self._of_client[one.who]:
            del self._of_client[one.who]

    def _too_many(self, one: _Holding) -> Overloaded:
        return Overloaded(
            f"{one.count} {self._of}: requests that run have {self.held}, and all together may have {self._most}, "
            f"those of one client {self._share}; retry later, or with fewer prompts or alternatives in a request",
            status=429,
            retry_after_s=_RETRY_AFTER_S,
        )


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
