"""Which parts of a step are captured and replayed, for which sizes, and how a step is padded to one of them.

Where a device captures ahead, a decode step of R rows (`Device.graph_sizes`) runs as one of the next larger size. The
rows added are dummies: token 0 at position 0 of the null block, with slot -1, so that they write no KV, and what they
draw goes to a row of the token table that nobody reads. A step with prompts (`Device.graph_tokens`) runs with more
tokens, which belong to no row, and as many rows as there can be, which have no tokens. Bounds that a graph was captured
with hold for every step.
"""

from __future__ import annotations

from bisect import bisect_left

from .device.base import Body, Device


class Graphs:
    """The captured parts of a step, by name and size. Belongs to the thread that launches."""

    def __init__(self, device: Device, *, max_rows: int, max_tokens: int, max_len: int) -> None:
        self._device = device
        self._max_len = max_len
        self.sizes = device.graph_sizes(max_rows)
        """Rows of decode steps, captured ahead, ascending; empty: each size when it is first met."""
        self.token_sizes = device.graph_tokens(max_tokens)
        """Tokens of steps with prompts, likewise; empty: such steps are not captured."""
        self.most_rows = self.padded(max_rows)
        """Rows that a step may be padded to."""
        self._memory = device.graph_memory()
        self._captured: dict[tuple[str, int], Body | None] = {}

    def padded(self, rows: int) -> int:
        """The size that a decode step of `rows` rows runs as."""
        return self.sizes[bisect_left(self.sizes, rows)] if self.sizes else rows

    def padded_tokens(self, tokens: int) -> int:
        """The tokens that a step with prompts of `tokens` tokens runs as; 0: it is not captured."""
        at = bisect_left(self.token_sizes, tokens)
        return self.token_sizes[at] if at < len(self.token_sizes) else 0

    def bound(self, longest: int) -> int:
        """The longest context that the kernels of a captured step are told of."""
        return self._max_len if self.sizes else longest

    def run(self, name: str, size: int, body: Body) -> None:
        """Run `body`, or what was captured of it. The same (name, size) must mean the same operations on the same
        memory."""
        key = (name, size)
        if key not in self._captured:
            self._captured[key] = self._device.capture(body, self._memory)
            return
        replay = self._captured[key]
        (replay or body)()

    def close(self) -> None:
        """Forget what was captured, whose memory the device may then use for others. Nothing runs after it."""
        self._captured.clear()

    def __len__(self) -> int:
        return sum(replay is not None for replay in self._captured.values())
