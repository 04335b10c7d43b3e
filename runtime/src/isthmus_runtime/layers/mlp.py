"""Gated MLPs (GLU variants, Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

from torch import Tensor

from isthmus_kernels import dispatch

from .linear import Linear
from .norm import Joint

Activation = Literal["silu", "gelu_tanh"]
_GATED: Mapping[Activation, Callable[..., Tensor]] = MappingProxyType(
    {"silu": dispatch.silu_mul, "gelu_tanh": dispatch.gelu_tanh_mul}
)


class Mlp(Protocol):
    """The second branch of a layer."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""

    def __call__(
        self,
        x: Tensor,
        *,
        gate_up: Tensor,
        inner: Tensor,
        out: Tensor,
        joint: Joint,
        adapters: Tensor | None = None,
    ) -> None:
        """x [T, H] to `joint`, by way of `out` [T, H] if need be. Scratch of a dense MLP: gate_up [T, 2 I], inner
        [T, I]. `adapters`: a batch's."""


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

    def __call__(
        self,
        x: Tensor,
        *,
        gate_up: Tensor,
        inner: Tensor,
        out: Tensor,
        joint: Joint,
        adapters: Tensor | None = None,
    ) -> None:
        """As `Mlp` says."""
        if self.activation == "silu" and adapters is None:
            self.gate_up.silu_mul(x, inner, gate_up)
        else:
            _GATED[self.activation](self.gate_up(x, gate_up, adapters), out=inner)
        self.down.join(inner, out, joint, adapters)

    def plain(self, x: Tensor, adapters: Tensor | None = None) -> Tensor:
        """x [T, H] to a new [T, H], in memory of its own."""
        return self.down(_GATED[self.activation](self.gate_up(x, slots=adapters)), slots=adapters)
