"""Gated MLPs (GLU variants, Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from isthmus_kernels import dispatch

from .linear import Linear
from .norm import Joint

Activation = Literal["silu", "gelu_tanh"]
_GATED: Mapping[Activation, Callable[..., Tensor]] = MappingProxyType(
    {"silu": dispatch.silu_mul, "gelu_tanh": dispatch.gelu_tanh_mul}
)


class MlpScratch(NamedTuple):
    """What an MLP may write on the way to the residual stream, for as many tokens as there are."""

    gate_up: Tensor
    """[T, 2 I], of a dense one."""
    inner: Tensor
    """[T, I], likewise."""
    out: Tensor
    """[T, H]."""


class Mlp(Protocol):
    """The second branch of a layer."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""

    def __call__(self, x: Tensor, scratch: MlpScratch, joint: Joint, adapters: Tensor | None) -> None:
        """x [T, H] to `joint`. `adapters`: a batch's; None: there are none."""


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """``down(activation(gate(x)) * up(x))``; `gate_up` is the joined projection, gate rows first."""

    gate_up: Linear
    down: Linear
    activation: Activation = "silu"

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.gate_up.nbytes + self.down.nbytes

    def __call__(self, x: Tensor, scratch: MlpScratch, joint: Joint, adapters: Tensor | None) -> None:
        """As `Mlp` says."""
        if self.activation == "silu" and adapters is None:
            self.gate_up.silu_mul(x, scratch.inner, scratch.gate_up)
        else:
            _GATED[self.activation](self.gate_up(x, scratch.gate_up, adapters), out=scratch.inner)
        self.down.join(scratch.inner, scratch.out, joint, adapters)

    def plain(self, x: Tensor, adapters: Tensor | None = None) -> Tensor:
        """x [T, H] to a new [T, H], in memory of its own."""
        return self.down(_GATED[self.activation](self.gate_up(x, slots=adapters)), slots=adapters)
