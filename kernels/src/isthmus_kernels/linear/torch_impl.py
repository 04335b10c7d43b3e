"""Linear through PyTorch's own library call: on GPUs, with native bf16, or where nothing is compiled."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A row-major weight in the dtype of the activations."""

    weight: Tensor
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def apply(self, x: Tensor, out: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias``."""
        if out is None:
            return functional.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self.weight.T, out=out)
        return torch.addmm(self.bias, x, self.weight.T, out=out)

    def outputs_from(self, first: int) -> "PlainWeight":
        """The outputs from `first` on, in the same memory."""
        return PlainWeight(self.weight[first:], None if self.bias is None else self.bias[first:])


def pack(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> PlainWeight:
    """Convert to the dtype of the activations, once."""
    return PlainWeight(weight.to(dtype), None if bias is None else bias.to(dtype))
