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

from .draft_model import DraftModel
from .drafters import FIRST_TRUST, TRUSTED, Drafter, ModelDrafter
from .sequence import Phase, Sequence
from .step_time import StepSize, StepTimes

MOST_FORCED = 16
"""Forced tokens of a row and step."""
FORCED_WORTH = 3.0
"""They are computed together where a token of a step's own costs so many times what one more in a step costs. Below,
what is won is lost again, for the step is planned only when its rows' newest tokens and masks are known."""
HOLD_SHARE = 4
"""Where one in so many requests guesses tokens, steps are planned one after the other, with all requests in each. Where
fewer do, they are left out of every second step, and the others are planned ahead."""
FIRST_FORCED, ENOUGH_FORCED, WEIGHT_FORCED = 0.08, 0.1, 0.05
"""How many of the tokens of a row with a grammar are forced, a moving average: where it begins, from where on the row
waits for its mask, and the weight of the newest. Few are enough, for none is wrong. It begins just below: where keys of
JSON are forced, the first of them shows it."""
MOSTLY_FORCED = 0.5
"""With more rows than `HOLD_SHARE`, half of them must be: it is left out of every second step then, or all others wait
for its mask."""


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
        """The drafter of a new request."""
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
        """Note how many of the newest tokens of a request with a grammar were forced; the others came after them."""
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
        """Note that the first `kept` of the request's drafts were right; its tokens are up to date."""
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
