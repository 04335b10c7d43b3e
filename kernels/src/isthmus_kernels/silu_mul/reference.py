"""Definition of the gated SiLU."""

import torch
from torch import Tensor


def silu_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return ``silu(x[..., :I]) * x[..., I:]`` for `x` of ``[T, 2 I]``, computed in fp32."""
    gate, up = x.float().chunk(2, dim=-1)
    result = gate * torch.sigmoid(gate) * up
    if out is None:
        return result.to(x.dtype)
    return out.copy_(result)
