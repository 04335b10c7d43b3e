"""The gated MLP of the Llama family (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from isthmus_kernels import dispatch

from .linear import Linear


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """``down(silu(gate(x)) * up(x))``; `gate_up` is the joined projection, gate rows first."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor, *, gate_up: Tensor, inner: Tensor, out: Tensor) -> Tensor:
        """x [T, H] to `out` [T, H]. Scratch: gate_up [T, 2 I], inner [T, I]."""
        self.gate_up(x, gate_up)
        dispatch.silu_mul(gate_up, out=inner)
        return self.down(inner, out)
