"""Who guesses one request's next tokens: its own text (prompt lookup), or a small model. Pure but for the model."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from .draft_model import DraftModel

GRAM = 3
"""Least tokens that must have come before."""
LONGEST, CANDIDATES = 16, 8
"""Of so many earlier places the one with the longest match wins, a match counting so many tokens at most."""
CATCH_UP = 2048
"""Tokens of a prompt that are looked through at a time."""
FIRST_TRUST, TRUSTED, WEIGHT = 0.4, 0.5, 0.15
"""A row guesses while its guesses are right more often than `TRUSTED`: a moving average with this weight of the newest,
which begins below it."""
FIRST_MODEL_TRUST, AGAIN = 0.7, 32
"""Drafts of a model are trusted until they are wrong, and again after so many tokens."""


class Drafter:
    """The n-grams of one request's tokens, and how often a guess was right."""

    __slots__ = ("_before", "_expected", "_newest", "trust")

    def __init__(self) -> None:
        self._newest: dict[tuple[int, ...], int] = {}
        """Of each n-gram, the length of the text at its newest end."""
        self._before: list[int] = []
        """Of each position, the same for the n-gram that ends there and came before; 0: none did."""
        self._expected: int | None = None
        self.trust = FIRST_TRUST

    seconds = 0.0
    """What a guessed token takes before it is verified."""

    def prepare(self, tokens: Tokens[int], count: int) -> bool:
        """The request waits for a guess of at most `count` tokens, unless there will be none (False): here it is at
        hand."""
        return True

    def learn(self, tokens: Tokens[int]) -> bool:
        """Take in what is new of `tokens`; False: there is more than `CATCH_UP` of it."""
        before, newest = self._before, self._newest
        upto = min(len(tokens), len(before) + CATCH_UP)
        for end in range(len(before) + 1, upto + 1):
            if end < GRAM:
                before.append(0)
                continue
            gram = tuple(tokens[end - GRAM : end])
            before.append(newest.get(gram, 0))
            newest[gram] = end
        return upto == len(tokens)

    def watch(self, tokens: Tokens[int]) -> bool:
        """Take in a new token, and judge the guess that would have been made for it. Whether to guess the next."""
        if self._expected is not None and len(tokens) == len(self._before) + 1:
            self.judge(self._expected == tokens[-1])
        self._expected = None
        if not self.learn(tokens):
            return False
        place = self._before[-1]
        if place:
            self._expected = tokens[place]
        return place > 0 and self.trust >= TRUSTED

    def judge(self, right: bool) -> None:
        """A guess was right, or was not."""
        self.trust += WEIGHT * (right - self.trust)

    def guess(self, tokens: Tokens[int], count: int) -> tuple[int, ...]:
        """At most `count` tokens to follow `tokens`; none where their end has not come before."""
        self._expected = None
        if not self.learn(tokens):
            return ()
        length, place = len(tokens), self._before[-1]
        best = matched = 0
        for _ in range(CANDIDATES):
            if not place:
                break
            same = GRAM
            while same < LONGEST and same < place and tokens[place - 1 - same] == tokens[length - 1 - same]:
                same += 1
            if same > matched:
                best, matched = place, same
            place = self._before[place - 1]
        # Text that repeats up to its very end goes on repeating.
        return tuple(tokens[best + i % (length - best)] for i in range(count)) if best else ()


class ModelDrafter:
    """One request's drafts of a small model. It guesses from the first, and tries again where it gave up."""

    __slots__ = ("_model", "_rest", "_sid", "trust")

    def __init__(self, model: DraftModel, sid: str) -> None:
        self._model = model
        self._sid = sid
        self._rest = 0
        self.trust = FIRST_MODEL_TRUST

    @property
    def seconds(self) -> float:
        """See `Drafter`."""
        return self._model.seconds

    def prepare(self, tokens: Tokens[int], count: int) -> bool:
        """See `Drafter`: the model begins."""
        return self._model.ask(self._sid, tokens, count)

    def learn(self, tokens: Tokens[int]) -> bool:
        """Nothing is kept here of the tokens."""
        return True

    def watch(self, tokens: Tokens[int]) -> bool:
        """A token came without a guess. Whether to guess the next."""
        self._rest = self._rest + 1 if self.trust < TRUSTED else 0
        if self._rest == AGAIN:
            self.trust, self._rest = TRUSTED, 0
        return self.trust >= TRUSTED

    def judge(self, right: bool) -> None:
        """See `Drafter`."""
        self.trust += WEIGHT * (right - self.trust)

    def guess(self, tokens: Tokens[int], count: int) -> tuple[int, ...]:
        """See `Drafter`; none where the model has not answered, which is as bad as a wrong one: it was waited for."""
        found = self._model.answer(self._sid, len(tokens))[:count]
        if not found:
            self.judge(False)
        return found
