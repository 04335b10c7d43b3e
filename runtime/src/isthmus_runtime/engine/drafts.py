"""Drafts of speculative decoding, guessed from the request's own text (prompt lookup). Pure.

Where the newest tokens have come before, the ones that followed them then are guessed to follow again; one forward pass
verifies all guesses (Leviathan et al. 2023, arXiv:2211.17192; for drafts without a model: Saxena 2023, "Prompt Lookup
Decoding"). A draw is kept as far as guesses equal it, so what is generated does not depend on guesses.

Guesses cost: tokens to verify, and a row that guesses is planned after its newest token was seen instead of ahead. So a
row that is planned ahead only *watches* how often a guess would have been right, which costs the device nothing. It
guesses when that is often enough, and as far as a token that is probably kept is worth more than it costs by the step
times that were measured. On text that does not repeat, and in batches that use the device well, nobody guesses.

A row with a grammar has drafts of another kind: the tokens to which its grammar leaves no alternative. They are always
right, so what is watched is how often there are any.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from .draft_model import DraftModel
from .sequence import Phase, Sequence
from .step_time import StepSize, StepTimes

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
MOST_FORCED = 16
"""Forced tokens of a row and step."""
FORCED_WORTH = 3.0
"""They are computed together where a token of a step's own costs so many times what one more in a step costs. Below,
what is won is lost again, for the step is planned only when its rows' newest tokens and masks are known."""
HOLD_SHARE = 4
"""Where one in so many requests guesses tokens, steps are planned one after the other, with all requests in each. Where
fewer do, they are left out of every second step, and the others are planned ahead."""
FIRST_FORCED, ENOUGH_FORCED, WEIGHT_FORCED = 0.08, 0.1, 0.05
"""The same for a row with a grammar: how many of its tokens are forced. They may be fewer, for none is wrong. It begins
just below: where keys of JSON are forced, the first of them shows it."""
MOSTLY_FORCED = 0.5
"""With more rows than `HOLD_SHARE`, half of them must be: it is left out of every second step then, or all others wait
for its mask."""


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
        """As of `Drafter`."""
        return self._model.seconds

    def prepare(self, tokens: Tokens[int], count: int) -> bool:
        """As of `Drafter`: the model begins."""
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
        """As of `Drafter`."""
        self.trust += WEIGHT * (right - self.trust)

    def guess(self, tokens: Tokens[int], count: int) -> tuple[int, ...]:
        """As of `Drafter`; none where the model has not answered, which is as bad as a wrong one: it was waited for."""
        found = self._model.answer(self._sid, len(tokens))[:count]
        if not found:
            self.judge(False)
        return found


class Speculation:
    """Who guesses, and how far."""

    def __init__(self, most: int, times: StepTimes, model: DraftModel | None = None) -> None:
        """`most`: drafts of a row and step; 0: none at all. `model`: who guesses; None: each from its own text."""
        self.most = most
        self._model = model
        self.drafted = self.accepted = 0
        """Tokens guessed so far, and how many of them were kept."""
        self.forced = 0
        """Tokens that a grammar forced, computed in one step with the token before."""
        self._times = times
        self._rows = 0

    def begin(self, rows: int) -> None:
        """A step is planned while so many requests run."""
        self._rows = rows

    def drafter(self, sid: str) -> Drafter | ModelDrafter:
        """For a new request."""
        return Drafter() if self._model is None else ModelDrafter(self._model, sid)

    @property
    def busy(self) -> bool:
        """Whether drafts that a request waits for are being computed."""
        return self._model is not None and self._model.busy

    def saw(self, seq: Sequence) -> None:
        """A token of the request became visible without a guess."""
        drafter = seq.drafter
        assert drafter is not None
        trust = max(FIRST_TRUST, drafter.trust)
        seq.holds = self._most(trust, self.most, drafter.seconds) > 0 and drafter.watch(seq.tokens)
        self._prepare(seq, drafter)

    def saw_masked(self, seq: Sequence, forced: int, others: int) -> None:
        """Of the newest tokens of a request with a grammar so many were forced; the others, after them, were not."""
        for was in (1.0,) * forced + (0.0,) * others:
            seq.forced_share += WEIGHT_FORCED * (was - seq.forced_share)
        enough = ENOUGH_FORCED if self._rows <= HOLD_SHARE else MOSTLY_FORCED
        seq.holds = seq.forced_share >= enough and self._forced_pay()

    def too_late(self, seq: Sequence) -> None:
        """The request's mask was waited for and did not come: its grammar is slow, and forced tokens not worth it."""
        seq.holds, seq.forced_share = False, 0.0

    def guess(self, seq: Sequence, room: int) -> tuple[int, ...]:
        """Drafts for the request's next step, at most `room`. Its tokens were all seen."""
        if seq.masks is not None:
            found = seq.masks.forced()
            return found.tokens[: max(0, min(room, len(found.masks)))] if self._forced_pay() else ()
        drafter = seq.drafter
        assert drafter is not None
        count = min(room, self._most(drafter.trust, self.most, drafter.seconds))
        return drafter.guess(seq.tokens, count) if count > 0 else ()

    def verified(self, seq: Sequence, drafts: int, kept: int) -> None:
        """Of the request's drafts the first `kept` were right; its tokens are up to date."""
        drafter = seq.drafter
        if drafter is None:
            self.forced += kept
            return
        self.drafted += drafts
        self.accepted += kept
        for _ in range(kept):
            drafter.judge(True)
        if kept < drafts:
            drafter.judge(False)
        drafter.learn(seq.tokens)
        seq.holds = drafter.trust >= TRUSTED
        self._prepare(seq, drafter)

    def _prepare(self, seq: Sequence, drafter: Drafter | ModelDrafter) -> None:
        if seq.holds and seq.phase is Phase.RUNNING:
            most = min(self.most, seq.end_len - seq.known - 1)
            enough = self._model is None or self._rows <= self._model.rows
            count = min(most, self._most(drafter.trust, self.most, drafter.seconds))
            seq.holds = enough and drafter.prepare(seq.tokens, count)

    def _most(self, trust: float, most: int, seconds: float = 0.0) -> int:
        """How many of `most` drafts are worth their cost, when each is right with probability `trust` if those before
        are. Each takes `seconds` before it is verified."""
        token, value = self._seconds()
        token += seconds
        count, kept = 0, trust
        while count < most and kept * value >= token:
            count, kept = count + 1, kept * trust
        return count

    def _forced_pay(self) -> bool:
        token, value = self._seconds()
        return value >= FORCED_WORTH * token

    def _seconds(self) -> tuple[float, float]:
        """What a token more in a step costs, and what a row's token costs in a step now."""
        alone = self._times.seconds(StepSize(self._rows, 0, 0.0))
        return self._times.prompt_seconds(0, 1), alone / max(1, self._rows)
