"""How many log-probabilities of generated tokens, and how much text, a server holds until they are told, all requests
together. Pure, of one event loop.

How many there will be is known by nobody before: an answer in one piece is held whole, and so is text of which nobody
knows yet whether it is a call of a tool. What prompts add is known (`budgets`).
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import InvalidRequest, Overloaded
from ..sharing.giving_way import Held, who_gives_way

MAX_OF_AN_ANSWER, MAX_OF_ANSWERS = 1 << 19, 1 << 20
"""Log-probabilities of what was generated that nobody has been told: of one request, as of 25,000 tokens with 20
alternatives, and of all. Each takes 120 bytes as a record, and 70 as text."""
CHARACTERS = 64
"""Of a whole answer's text that count as one: 32 Mi of one answer, of all 64 Mi. While it is written a text takes three
to six times as much."""
_BYTES = 256
"""That one takes, about, with what is written of it."""
_RETRY_AFTER_S = 1.0


class TextSize:
    """Characters as which a text counts that comes in pieces: with one that is not ASCII each may take four bytes, also
    those before it, as all are joined."""

    def __init__(self) -> None:
        self._length = 0
        self._wide = False

    def more(self, *pieces: str) -> int:
        """How much it has grown by `pieces`."""
        new = sum(map(len, pieces))
        self._length += new
        if self._wide:
            return 4 * new
        if all(map(str.isascii, pieces)):
            return new
        self._wide = True
        return 3 * self._length + new


class AnswerScores:
    """What the answers of one server hold until it is told."""

    def __init__(self) -> None:
        self.held = 0
        self._answers: set[Untold] = set()

    def answer(self, who: str = "", task: object = None) -> Untold:
        """Count what one request of a client holds, which the task works on, while it is entered."""
        return Untold(self, who, task)

    def by_task(self) -> Iterator[tuple[object, int]]:
        """Bytes of each request that runs."""
        return ((one.task, one.held * _BYTES) for one in self._answers if one.held)

    def begins(self, untold: Untold) -> None:
        """A request runs."""
        self._answers.add(untold)

    def ends(self, untold: Untold) -> None:
        """It does not any more."""
        self._answers.remove(untold)
        self.held -= untold.held

    def make_room(self) -> None:
        """Where all hold too many, the largest of the client that holds most has to end, until there is room."""
        if self.held <= MAX_OF_ANSWERS:
            return
        stay = [Held(one.who, one.held, one) for one in self._answers if not one.gives_way]
        excess = sum(one.size for one in stay) - MAX_OF_ANSWERS
        for one in who_gives_way(stay, excess):
            one.what.gives_way = True


class Untold:
    """What one request's answer holds."""

    def __init__(self, budget: AnswerScores, who: str, task: object) -> None:
        self.who = who
        self.task = task
        self.held = 0
        self.gives_way = False
        self._budget = budget
        self._characters = 0

    def __enter__(self) -> Untold:
        self._budget.begins(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.ends(self)

    def add(self, count: int) -> None:
        """Count so many more. InvalidRequest: too many of one request; Overloaded (429): of all, and here are most."""
        self.held += count
        self._budget.held += count
        if self.held > MAX_OF_AN_ANSWER:
            raise InvalidRequest(
                f"the answer has more than {MAX_OF_AN_ANSWER} log-probabilities that were not sent yet, with their "
                f"alternatives and over all choices, or {CHARACTERS} characters of text for each; stream it, or ask "
                "for fewer tokens (max_tokens), choices (n) or alternatives (logprobs)"
            )
        self._budget.make_room()
        if self.gives_way:
            raise Overloaded(
                f"{self.held} log-probabilities of this answer, or {CHARACTERS} characters of its text for each: all "
                f"that run may have {MAX_OF_ANSWERS} together, and no other client has more; retry later, stream it, "
                "or ask for fewer tokens, choices or alternatives",
                status=429,
                retry_after_s=_RETRY_AFTER_S,
            )

    def add_text(self, characters: int) -> None:
        """So much text more that is told last, or, below zero, so much less that is held back. Raises as `add`."""
        self._characters += characters
        count, self._characters = divmod(self._characters, CHARACTERS)
        if count > 0:
            self.add(count)
        elif count:
            self.told(-count)

    def told(self, count: int) -> None:
        """Note that so many were sent."""
        self.held -= count
        self._budget.held -= count
