"""How long the next step will take, learnt from the steps before. Pure: time comes in as an argument.

A step's time is taken as a sum of four parts, each with a cost in seconds that is learnt: the step itself (weights are
read once, whatever is in it), each row, each prompt token, and each pair of a prompt token and one before it
(attention; this is what makes the last chunk of a long prompt slower than the first).

The costs follow the newest steps by normalised least mean squares (Widrow and Hoff 1960; Nagumo and Noda 1967) with a
gain for each part that goes with the square of its share in the expected time, as in the proportionate variant
(Duttweiler 2000): what made up most of the step is blamed most for an error, and the units cancel, so that a device
that is a thousand times faster needs no other constants. A slow step counts at most as twice what was expected: one
outlier makes the next chunks shorter and does not stop them. A step larger than any before is believed at once, for
nothing else tells of its size.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

FIRST_TOKENS = 64
"""Prompt tokens of the first step, of which nothing is known."""
GROWTH = 2
"""A step takes at most so many times the prompt tokens of the largest step that was measured: what was learnt from
small ones says little about large ones."""
SLOWER, FASTER = 1.0, 0.25
"""Gains for steps that took longer, and less long, than expected. A wrong guess upwards costs a stream a gap, one
downwards a little throughput: the estimate settles above the median."""
APART = 0.1
"""Weight in the blame of what steps without prompts show apart, in a step with prompts."""
OUTLIER = 2.0
"""More than so many times the expected time is not believed at once."""
RESOLUTION_S = 1e-9
_PRIOR = (16.0, 2.0, 1.0, 1.0 / 16384)
"""Relative costs (step, row, token, pair) by which the first measured step is split. By operations, a token costs what
4,000 pairs do in a model of 0.1 billion parameters and what 27,000 do in one of 8 billion: too few pairs are soon
known to be too few, and too many cut long prompts in pieces for nothing."""


class StepSize(NamedTuple):
    """What decides how long a step takes."""

    rows: int
    tokens: int
    """Of prompts: in chunks of more than one token."""
    attended: float
    """Sum over these tokens of how many precede each in its prompt."""


def attended(start: int, count: int) -> float:
    """Pairs of one of `count` tokens from position `start` on and a token before it."""
    return count * (start + count / 2)


class StepTimes:
    """The learnt costs. Reads no clock."""

    __slots__ = ("_costs", "_largest")

    def __init__(self) -> None:
        self._costs: tuple[float, float, float, float] | None = None
        self._largest = 0

    @property
    def most_tokens(self) -> int:
        """Prompt tokens that a step may have by what was measured so far."""
        return max(FIRST_TOKENS, GROWTH * self._largest)

    def seconds(self, size: StepSize) -> float:
        """How long such a step takes; 0 while nothing is known."""
        if self._costs is None:
            return 0.0
        step, row, token, pair = self._costs
        return step + row * size.rows + token * size.tokens + pair * size.attended

    def prompt_seconds(self, start: int, count: int) -> float:
        """What `count` prompt tokens from position `start` on add to a step."""
        return 0.0 if self._costs is None else self._costs[2] * count + self._costs[3] * attended(start, count)

    def tokens_in(self, seconds: float, start: int) -> int:
        """How many prompt tokens from position `start` on add at most `seconds` to a step."""
        if self._costs is None:
            return FIRST_TOKENS
        if seconds <= 0:
            return 0
        _, _, token, pair = self._costs
        # token n + pair n (start + n / 2) = seconds, in the form that does not cancel.
        slope = token + pair * start
        return int(2 * seconds / (slope + sqrt(slope * slope + 2 * pair * seconds)))

    def learn(self, size: StepSize, seconds: float) -> None:
        """Such a step took so long. What no clock resolves teaches nothing."""
        if seconds < RESOLUTION_S:
            return
        larger = size.tokens > self._largest
        if larger:
            self._largest = size.tokens
        costs = self._costs
        if costs is None:
            step, row, token, pair = _PRIOR
            unit = seconds / (step + row * size.rows + token * size.tokens + pair * size.attended)
            self._costs = (step * unit, row * unit, token * unit, pair * unit)
            return
        a, b, c, d = costs[0], costs[1] * size.rows, costs[2] * size.tokens, costs[3] * size.attended
        expected = a + b + c + d
        if seconds < expected:
            gain, error = FASTER, seconds - expected
        elif larger:
            gain, error = 1.0, seconds - expected
        else:
            gain, error = SLOWER, min(seconds, OUTLIER * expected) - expected
        rest = APART if size.tokens else 1.0
        # Times FASTER it is above -1 for every part: no cost falls to zero, however fast a step was.
        gain *= error / (rest * (a * a + b * b) + c * c + d * d)
        self._costs = (
            costs[0] * (1 + gain * rest * a),
            costs[1] * (1 + gain * rest * b),
            costs[2] * (1 + gain * c),
            costs[3] * (1 + gain * d),
        )
