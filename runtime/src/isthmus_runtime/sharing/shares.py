"""How much of something each client has. Pure."""


class Shares(dict[str, int]):
    """What each client has. Who has nothing is forgotten: strangers are many."""

    all = 0

    def __missing__(self, who: str) -> int:
        return 0

    def add(self, who: str, count: int) -> None:
        """A client has so much more, or, below zero, less."""
        self.all += count
        left = self.get(who, 0) + count
        assert left >= 0, f"{-count} of {who} came back, which leaves {left}"
        if left:
            self[who] = left
        else:
            self.pop(who, None)
