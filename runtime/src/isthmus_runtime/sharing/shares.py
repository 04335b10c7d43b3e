"""How much of something each client has. Pure."""

from collections import Counter


class Shares(Counter[str]):
    """By client. Who has nothing is forgotten: strangers are many."""

    all = 0

    def add(self, who: str, count: int) -> None:
        """A client has so much more, or, below zero, less."""
        self.all += count
        self[who] += count
        assert self[who] >= 0, f"{-count} of {who} came back, which leaves {self[who]}"
        if not self[who]:
            del self[who]
