"""Masks that are computed while a step's forward pass runs: taken right before the draw. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from ..interfaces.steps import Later, LateRowMask

PATIENCE_S = 0.010
"""A step waits so long at most for masks whose tokens were seen, all of them together."""


def take(late: Sequence[LateRowMask]) -> tuple[dict[int, bytes], set[int]]:
    """Wait for the masks: those there are by row, and the rows whose mask did not come, which draw nothing."""
    found = {each.row: each.mask.wait(0.0) for each in late}
    until = monotonic() + PATIENCE_S
    for each in late:
        if isinstance(found[each.row], Later):
            found[each.row] = each.mask.wait(max(0.0, until - monotonic()))
    masks = {row: mask for row, mask in found.items() if isinstance(mask, bytes)}
    return masks, {row for row, mask in found.items() if isinstance(mask, Later)}
