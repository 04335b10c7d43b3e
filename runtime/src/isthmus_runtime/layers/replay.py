"""Runs a fixed sequence of ops as one call, once it has been run op by op."""

from __future__ import annotations

from collections.abc import Callable

from isthmus_kernels import dispatch


class Replay:
    """One recorded program per key. A key stands for the addresses and shapes that the sequence works on.

    A decode step is a few hundred calls of a few microseconds each; replaying them as one leaves no Python between
    them. A sequence in which some op does not record (another device, a shape that torch computes) runs op by op.
    """

    __slots__ = ("_calls", "_programs")

    def __init__(self, calls: int) -> None:
        """`calls`: how many ops the whole sequence has; fewer recorded ones mean that it cannot be replayed."""
        self._calls = calls
        self._programs: dict[int, dispatch.Program | None] = {}

    def run(self, key: int, body: Callable[[], None]) -> None:
        """Run `body`, or what it recorded under `key` before."""
        if key in self._programs:
            program = self._programs[key]
            if program is None:
                body()
            else:
                program.run()
            return
        with dispatch.record() as recorded:
            body()
        self._programs[key] = recorded if len(recorded) == self._calls else None
