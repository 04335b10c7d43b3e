"""Experts as the 4-bit floats that a checkpoint holds, for a device that multiplies them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import Tensor

from ..models.base import ScaledSource, TensorSource
from ..models.shard import Slice

Pack = Callable[[Tensor, Tensor], tuple[Tensor, Tensor] | None]
"""Numbers and scales to what kernels multiply; None: they do not. `isthmus_kernels.dispatch_weights.pack_mxfp4`."""


@runtime_checkable
class Mxfp4Source(TensorSource, Protocol):
    """A source some of whose matrices are stored as 4-bit floats."""

    def as_mxfp4(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Numbers uint8 [E, N, G, 16] and scales uint8 [E, N, G] of the weight `name` [E, 32 G, N], inputs first; None:
        it is not stored so."""


class Mxfp4Weights:
    """`models.base.PackedSource` over another source."""

    def __init__(self, stored: Mxfp4Source, others: TensorSource, pack: Pack) -> None:
        """`others`: where all but 4-bit floats are taken."""
        self._pack = pack
        self._stored = stored
        self._others = others
        self.kept, self.left = 0, 0
        """Matrices of all experts so far: as they were stored, and with a scale that the kernels do not take."""

    def take(self, *parts: str | Slice) -> Tensor:
        """As the others have it."""
        return self._others.take(*parts)

    def scaled(self, *parts: str | Slice) -> tuple[Tensor, Tensor] | None:
        """As the others have it."""
        return self._others.scaled(*parts) if isinstance(self._others, ScaledSource) else None

    def packed(self, *names: str) -> list[tuple[Tensor, Tensor]] | None:
        """Each of these weights as kernels multiply it, outputs first; None: `take` them."""
        made = []
        for name in names:
            found = self._stored.as_mxfp4(name)
            if found is None:
                return None
            packed = self._pack(*found)
            if packed is None:
                self.left += len(names)
                return None
            made.append(packed)
        self.kept += len(names)
        return made
