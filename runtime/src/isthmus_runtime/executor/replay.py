"""Runs a fixed sequence of ops as one call, once it has been run op by op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from isthmus_kernels import dispatch

# They make or describe memory, and compute nothing that a replay would miss.
_HARMLESS = ("aten::empty", "aten::detach", "aten::alias")


class Replay:
    """One recorded program per key. A key stands for the addresses and shapes that the sequence works on.

    A decode step is a few hundred calls of a few microseconds each; replaying them as one leaves no Python between
    them. A sequence in which some op does not record (another device, a shape that torch computes) runs op by op.
    """

    __slots__ = ("_programs",)

    def __init__(self) -> None:
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
        with dispatch.record() as recorded, _Watch() as watch:
            body()
        self._programs[key] = recorded if len(recorded) and not watch.computed else None


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices whether torch itself computes anything."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computed: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view and not func.name().startswith(_HARMLESS):
            self.computed.add(func.name())
        return func(*args, **(kwargs or {}))
