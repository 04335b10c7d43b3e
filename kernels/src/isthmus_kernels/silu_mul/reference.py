"""Definition of the gated activations."""

import torch
from torch import Tensor


def silu_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return ``silu(x[..., :I]) * x[..., I:]`` for `x` of ``[T, 2 I]``, computed in fp32, or in the fp64 of `x`."""
    gate, up = _wide(x).chunk(2, dim=-1)
    return _store(gate * torch.sigmoid(gate) * up, x, out)


def gelu_tanh_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return ``gelu(x[..., :I]) * x[..., I:]``, GELU in its tanh form, computed as `silu_mul` is."""
    gate, up = _wide(x).chunk(2, dim=-1)
    return _store(torch.nn.functional.gelu(gate, approximate="tanh") * up, x, out)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _store(result: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
    return result.to(x.dtype) if out is None else out.copy_(result)
