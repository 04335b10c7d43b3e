"""Which tokens of a step are drawn, and how: for the sampler, from what each row's request asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..interfaces.steps import LateRowMask, RowStart
from .adjustments import AdjustedRows, Adjustments
from .sampling_rows import SamplingRows
from .staging import Packer

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Which rows of a step draw, and how. Tensors are on the device."""

    count: int
    """Rows that draw; the tensors may hold dummies after them."""
    logit_rows: Tensor
    """int64 [S]: the tokens of the step whose successor is drawn; numbered among those that are read."""
    targets: Tensor
    """int64 [S]: where in the token table each drawn token goes."""
    graph: int
    """Size of the captured graph that may draw; 0: there is none for these draws."""
    parameters: dict[str, Any]
    """Keyword arguments of the sampler, [S] each; empty: all rows are greedy. Filters that no row uses are absent."""
    asking: Longs
    """Which of the rows want log-probabilities (host)."""
    asking_rows: Tensor | None
    """The same on the device."""
    wanted: Ints
    """How many alternatives each of them wants."""
    masks: tuple[tuple[int, bytes], ...]
    """Draws that may not take every id, and their masks (`interfaces.steps.RowMask`), on the host."""
    late_masks: tuple[tuple[int, LateRowMask], ...]
    """Draws whose masks are computed meanwhile."""
    adjustments: Adjustments | None
    """What changes logits before the draw; None: nothing."""


class DrawRows:
    """How each row draws."""

    def __init__(self, max_rows: int, *, stride: int, most: int) -> None:
        """`stride`: columns of the token table, which has a row for dummies behind its `max_rows`; `most`: draws of a
        step."""
        self._stride = stride
        self._dummy = max_rows * stride
        self._sampling = SamplingRows(max_rows)
        self._adjusted = AdjustedRows()
        self._arange: Longs = np.arange(most, dtype=np.int64)

    def set(self, start: RowStart) -> None:
        """Set what the row's request asks for."""
        self._sampling.set(start.row, start.sampling)
        self._adjusted.set(start.row, start.sampling, start.prompt_len)

    def of(
        self,
        pack: Packer,
        rows: Longs,
        ends: Longs,
        last: Longs,
        draws: Longs,
        masks: Mapping[int, tuple[bytes, ...]],
        late_masks: Mapping[int, LateRowMask],
        size: int,
    ) -> Draws | None:
        """The draws of a step's chunks, laid out in `pack`; None: nothing is drawn.

        Args:
            rows, ends, draws: of each chunk its row, the position behind it, and how many tokens it draws.
            last: of each chunk, the number of the token behind its last one, among those that are read.
            masks, late_masks: by row.
            size: of the captured graph that draws for rows without parameters; 0: none does.
        """
        if draws.max(initial=0) > 1:
            drawing = np.repeat(self._arange[: len(draws)], draws)
            # Drafts are verified from the first on: how many tokens each draw is before the chunk's last.
            before = np.cumsum(draws)[drawing] - 1 - self._arange[: len(drawing)]
            ends, last = ends[drawing] - before, last[drawing] - before
        else:
            drawing = np.flatnonzero(draws)
            ends, last = ends[drawing], last[drawing]
        count = len(drawing)
        if not count and not (size and not len(rows)):
            return None
        draw_rows, at = rows[drawing], ends
        parameters, wanted = self._sampling.of(draw_rows)
        asking = np.flatnonzero(wanted >= 0)
        masked, late = _masked(draw_rows, masks), _late(draw_rows, late_masks)
        adjustments = self._adjusted.of(draw_rows, at)
        # A graph draws for all its rows, without parameters.
        plain = not parameters and not len(asking) and not masked and not late and adjustments is None
        graph = size if count == len(rows) and plain else 0
        width = graph or count
        logit_rows, logit_rows_there = pack.take(width, torch.int64)
        logit_rows[:count] = last - 1
        logit_rows[count:] = self._arange[count:width]
        targets, targets_there = pack.take(width, torch.int64)
        targets[:count] = draw_rows * self._stride + at
        targets[count:] = self._dummy
        on_device: dict[str, Any] = {}
        if parameters:
            for name, values in {**parameters, "positions": at}.items():
                here, on_device[name] = pack.take(count, torch.from_numpy(values).dtype)
                here[:] = values
        asking_rows: Tensor | None = None
        if len(asking):
            here, asking_rows = pack.take(len(asking), torch.int64)
            here[:] = asking
        return Draws(
            count=count,
            logit_rows=logit_rows_there,
            targets=targets_there,
            graph=graph,
            parameters=on_device,
            asking=asking,
            asking_rows=asking_rows,
            wanted=wanted[asking],
            masks=masked,
            late_masks=late,
            adjustments=adjustments,
        )


def _masked(rows: Longs, masks: Mapping[int, tuple[bytes, ...]]) -> tuple[tuple[int, bytes], ...]:
    """The masks of rows as those of draws: a row's draws follow one another, and so do its masks."""
    if not masks:
        return ()
    left = {row: iter(allowed) for row, allowed in masks.items()}
    return tuple((draw, next(left[row])) for draw, row in enumerate(rows.tolist()) if row in left)


def _late(rows: Longs, masks: Mapping[int, LateRowMask]) -> tuple[tuple[int, LateRowMask], ...]:
    """The same of masks that come late, one a row."""
    return tuple((draw, masks[row]) for draw, row in enumerate(rows.tolist()) if row in masks) if masks else ()
