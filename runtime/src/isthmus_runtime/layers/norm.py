"""RMSNorm, alone or fused with the residual addition before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from isthmus_kernels import dispatch


class RmsNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (Zhang & Sennrich 2019)."""

    __slots__ = ("eps", "weight")

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        self.weight = weight.to(dtype).contiguous()
        self.eps = eps

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Norm of x [T, H] into `out`."""
        return dispatch.rms_norm(x, self.weight, self.eps, out=out)

    def add(self, x: Tensor, residual: Tensor, out: Tensor) -> Tensor:
        """``residual += x`` in place, then its norm into `out`, which may be x."""
        return dispatch.add_rms_norm(x, residual, self.weight, self.eps, out=out)


class RankSums(Protocol):
    """Sums over the ranks that compute a model together. Every rank makes the same calls in the same order."""

    parts: bool
    """Whether `sum_add_rms_norm` adds up parts as it goes."""

    def sum(self, x: Tensor) -> None:
        """Replace `x` on every rank by the sum over all ranks, the same bits on each."""

    def sum_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """Add the sum over all ranks to `residual` [T, H], in place, and write its norm to `out` [T, H]: the same bits
        on every rank.

        Args:
            x: this rank's summand [T, H], which may be `out`; or with `parts` fp32 [P, T, H], whose sum over P it is.
                What is left in it is not told.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """Where the output of a branch joins the residual stream, which is then normed for the next branch."""

    residual: Tensor
    """[T, H]: what the output is added to."""
    ranks: RankSums | None
    """By which this rank's output becomes that of all, before anything else; None: it is."""
    after: RmsNorm | None
    """Of the output, before it is added."""
    norm: RmsNorm | None
    """Of the stream. None: the output is not added, and stays where the branch left it."""
    normed: Tensor
    """[T, H]: where the normed stream goes; may be what the branch reads."""

    @property
    def direct(self) -> bool:
        """Whether the output is added as it is, so that the product that makes it may add it."""
        return self.ranks is None and self.after is None and self.norm is not None

    @property
    def takes_parts(self) -> bool:
        """Whether an output may come as fp32 [P, T, H], whose sum over P it is."""
        return self.ranks is not None and self.ranks.parts and self.after is None and self.norm is not None

    def take(self, output: Tensor) -> None:
        """The whole output [T, H] of a branch, or its parts; it is changed."""
        if self.ranks is not None:
            if (norm := self.norm) is not None and self.after is None:
                self.ranks.sum_add_rms_norm(output, self.residual, norm.weight, norm.eps, self.normed)
                return
            self.ranks.sum(output)
        if self.after is not None:
            self.after(output, output)
        if self.norm is not None:
            self.norm.add(output, self.residual, self.normed)
