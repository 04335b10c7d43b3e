"""Definition of products with 8-bit weights: rows of x and of the weight rounded to E4M3 with a scale each."""

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 448.0
"""Of E4M3."""
# Of a row's largest number: a row of zeros, whose numbers are 0 with any scale.
_LEAST = 1e-12


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round `x` ``[..., K]`` to E4M3 by rows: what is stored, and fp32 scales ``[...]``."""
    wide = x.float()
    most = wide.abs().amax(dim=-1).clamp_min(_LEAST)
    return (wide * (most.reciprocal() * LARGEST)[..., None]).to(torch.float8_e4m3fn), most * (1 / LARGEST)


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """An E4M3 weight ``[N, K]``, fp32 scales of its rows ``[N]``, and a bias."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes + self.scale.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def apply(self, x: Tensor, out: Tensor | None) -> Tensor:
        """Return the product of the rounded factors, in x's dtype."""
        rounded, scale = quantize(x)
        result = rounded.float() @ self.weight.float().T * scale[:, None] * self.scale
        if self.bias is not None:
            result += self.bias.float()
        return result.to(x.dtype) if out is None else out.copy_(result)

    def outputs_from(self, first: int) -> "ScaledWeight":
        """The outputs from `first` on, in the same memory."""
        return ScaledWeight(self.weight[first:], self.scale[first:], None if self.bias is None else self.bias[first:])


def pack_fp8(weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> ScaledWeight:
    """Hold them; the bias in the activations' dtype."""
    return ScaledWeight(weight.contiguous(), scale.float().contiguous(), None if bias is None else bias.to(dtype))
