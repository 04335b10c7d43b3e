"""Mixture of experts (Shazeer et al. 2017): each token goes through a few of many gated MLPs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from isthmus_kernels import dispatch

from .linear import Linear
from .mlp import GatedMlp, MlpScratch
from .norm import Joint


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The matrices of all experts of a mixture."""

    gate_up: Tensor
    """[E, 2 I, H], gate rows first; of 4-bit floats their bytes (`dispatch_weights.pack_mxfp4`)."""
    down: Tensor
    """[E, H, I], likewise."""
    gate_up_scale: Tensor | None = None
    """fp32 [E, 2 I]: of the rows of 8-bit floats; int32 [E, 2 I, ...]: of the blocks of 4-bit ones; None: the matrices
    are in the dtype of the computation."""
    down_scale: Tensor | None = None
    """fp32 [E, H], or int32 [E, H, ...]."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        scales = [scale.nbytes for scale in (self.gate_up_scale, self.down_scale) if scale is not None]
        return self.gate_up.nbytes + self.down.nbytes + sum(scales)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeMlp:
    """``sum_e w_e down_e(silu(gate_e(x)) * up_e(x))`` over the `top_k` experts that the router finds likeliest."""

    router: Linear
    """H to E."""
    weights: ExpertWeights
    top_k: int
    renormalize: bool
    """The chosen experts' weights are scaled to a sum of 1."""
    gate_up_bias: Tensor | None = None
    """[E, 2 I]."""
    down_bias: Tensor | None = None
    """[E, H]."""
    sigmoid: bool = False
    """Scores of experts are sigmoids, not a softmax."""
    choice_bias: Tensor | None = None
    """fp32 [E]: added to the scores for the choice alone."""
    groups: tuple[int, int] | None = None
    """Groups of experts, and how many of them a token may choose from."""
    scale: float = 1.0
    """On the chosen experts' weights."""
    shared: GatedMlp | None = None
    """Goes over every token, beside the chosen ones."""
    clamp: tuple[float, float] | None = None
    """(α, c): the clamped activation of `dispatch.moe`, instead of SiLU's."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        shared = 0 if self.shared is None else self.shared.nbytes
        return self.router.nbytes + self.weights.nbytes + shared

    def __call__(self, x: Tensor, scratch: MlpScratch, joint: Joint, adapters: Tensor | None) -> None:
        """As `Mlp` says. `adapters` are of the shared expert; the others have none."""
        out = scratch.out
        weights, experts = dispatch.moe_route(
            self.router(x),
            self.top_k,
            renormalize=self.renormalize,
            sigmoid=self.sigmoid,
            bias=self.choice_bias,
            groups=self.groups,
            scale=self.scale,
        )
        dispatch.moe(
            x,
            weights,
            experts,
            self.weights.gate_up,
            self.weights.down,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            gate_up_scale=self.weights.gate_up_scale,
            down_scale=self.weights.down_scale,
            clamp=self.clamp,
            out=out,
        )
        if self.shared is not None:
            out.add_(self.shared.plain(x, adapters))
        joint.take(out)
