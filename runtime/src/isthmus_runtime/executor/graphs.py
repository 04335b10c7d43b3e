"""Which parts of a step are captured and replayed, for which sizes, and how a step is padded to one of them.

Where a device captures ahead, a decode step of R rows (`Device.graph_sizes`) runs as one of the next larger size. The
rows added are dummies: token 0 at position 0 of the null block, with slot -1, so that they write no KV, and what they
draw goes to a row of the token table that nobody reads. A step with prompts (`Device.graph_tokens`) runs with more
tokens, which belong to no row, and as many rows as there can be, which have no tokens. Bounds that a graph was captured
with hold for every step.

Where a device captures each size when it is first met, nothing is computed in vain: a step with prompts has those rows
without tokens, and its own tokens (at most `Device.met_tokens`). The sizes met last are kept.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from .device.base import Body, Device

_KEPT = 256
"""Captured parts that are kept where sizes are captured as they are met: of a model of 28 layers one holds a third of a
megabyte, and steps that are bounded by time have some dozens of sizes."""


class StepShape(NamedTuple):
    """How large a step is once it is padded, and what its kernels are told."""

    decode: bool
    """Each row has one token, and no prompt is among them."""
    rows: int
    tokens: int
    most: int
    """Most tokens of a row."""
    longest: int
    """Longest context."""
    graph: tuple[str, int] | None
    """Name and size of what was captured of such steps; None: nothing is."""


class Graphs:
    """The captured parts of a step, by name and size. Belongs to the thread that launches."""

    def __init__(self, device: Device, *, max_rows: int, max_tokens: int, max_len: int) -> None:
        self._device = device
        self._max_len = max_len
        self.sizes = device.graph_sizes(max_rows)
        """Rows of decode steps, captured ahead, ascending; empty: each size when it is first met."""
        self.token_sizes = device.graph_tokens(max_tokens)
        """Tokens of steps with prompts, likewise."""
        self._met_tokens = device.met_tokens
        self.most_rows = self.padded(max_rows)
        """Rows that a step may be padded to."""
        self._memory = device.graph_memory()
        self._captured: dict[tuple[str, int], Body | None] = {}
        """The one used last is the last, unless sizes are captured ahead."""

    def shape(
        self, rows: int, tokens: int, most: int, longest: int, *, size: int = 0, prompts: bool = False
    ) -> StepShape:
        """The shape of a step of `rows` rows with `tokens` tokens, `most` of a row; `prompts`: though each has one.
        `size`: to be captured at."""
        if most == 1 and not prompts:
            size = size or self.padded(rows)
            return StepShape(True, size, size, most, self.bound(longest), ("decode", size))
        size = size or self.padded_tokens(tokens)
        if not size:
            return StepShape(False, rows, tokens, most, longest, None)
        return StepShape(False, self.most_rows, size, size, self.bound(longest), ("prompts", size))

    def padded(self, rows: int) -> int:
        """The size that a decode step of `rows` rows runs as."""
        return self.sizes[bisect_left(self.sizes, rows)] if self.sizes else rows

    def padded_tokens(self, tokens: int) -> int:
        """The tokens that a step with prompts of `tokens` tokens runs as; 0: it is not captured."""
        if tokens <= self._met_tokens:
            return tokens
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
            self._captured[key] = captured = self._device.capture(body, self._memory)
            if captured is None and name.startswith("prompts"):
                # What cannot be repeated at one size cannot at others, and need not be like others of its size.
                self._met_tokens = 0
            elif not self.sizes and len(self._captured) > _KEPT:
                del self._captured[next(iter(self._captured))]
            return
        replay = self._captured[key]
        if not self.sizes:
            self._captured[key] = self._captured.pop(key)
        (replay or body)()

    def close(self) -> None:
        """Forget what was captured, whose memory the device may then use for others. Nothing runs after it."""
        self._captured.clear()

    def __len__(self) -> int:
        return sum(replay is not None for replay in self._captured.values())
