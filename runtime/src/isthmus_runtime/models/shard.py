"""Tensor parallelism: what one of several ranks holds of each weight, and what ranks exchange. Torch-free at run time.

As in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): projections into heads and inner channels are split by their
outputs (q, k, v, gate, up), those back to the hidden size by their inputs (o, down), so that each rank's product is a
summand of the whole and a branch needs one sum over the ranks. The head is split by vocabulary, and its logits are
gathered, so that every rank draws the same tokens; embedding and norms are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Slice(NamedTuple):
    """Indices [start, stop) of dimension `dim` (0: rows, 1: columns) of the tensor `name`."""

    name: str
    dim: int
    start: int
    stop: int

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Its shape, where the tensor's is `whole`."""
        assert 0 <= self.start <= self.stop <= whole[self.dim], (self, whole)
        return (*whole[: self.dim], self.stop - self.start, *whole[self.dim + 1 :])

    def row_bytes(self, whole: Sequence[int], itemsize: int) -> tuple[int, int, int]:
        """How it lies in a tensor of shape `whole` and such elements: byte offset of its first run, bytes of a run, and
        from one run to the next. Runs that follow one another are one."""
        inner = itemsize * prod(whole[self.dim + 1 :])
        run, step = (self.stop - self.start) * inner, whole[self.dim] * inner
        runs = prod(whole[: self.dim])
        return (self.start * inner, run * runs, run * runs) if run == step else (self.start * inner, run, step)

    def of(self, tensor: Tensor) -> Tensor:
        """A view of it in the whole tensor."""
        return tensor.narrow(self.dim, self.start, self.stop - self.start)

    def cut(self, tensor: Tensor) -> Tensor:
        """A copy of the slice alone: the rest of the whole tensor can be freed."""
        part = self.of(tensor)
        return tensor if part.shape == tensor.shape else part.contiguous() if not part.is_contiguous() else part.clone()


class Collectives(Protocol):
    """What the ranks of one engine exchange inside a step. Every rank makes the same calls in the same order. The sums
    are those of `layers.norm.RankSums`."""

    parts: bool
    """Whether a summand may come in parts."""

    def sum(self, x: Tensor) -> None:
        """Replace `x` on every rank by the sum over all ranks, the same bits on each."""

    def sum_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """Add the sum over all ranks to `residual` [T, H], in place, and write its norm to `out`."""

    def gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks, which have one shape, by rank: [size, *part.shape]."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size` that compute one model together. The default is a model that one rank computes alone."""

    rank: int = 0
    size: int = 1
    collectives: Collectives | None = None

    def part(self, count: int) -> tuple[int, int]:
        """This rank's [start, stop) of `count` things. Where the ranks do not divide it, the last have fewer."""
        each = -(-count // self.size)
        return min(count, self.rank * each), min(count, (self.rank + 1) * each)

    def kv_heads(self, count: int) -> tuple[int, int]:
        """This rank's [start, stop) of `count` key and value heads. With fewer heads than ranks, ranks share one."""
        if count >= self.size:
            return self.part(count)
        head = self.rank * count // self.size
        return head, head + 1


WHOLE = Shard()
