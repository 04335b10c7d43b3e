"""Definition of RMSNorm and of RMSNorm fused with the residual addition."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in fp32."""
    wide = x.float()
    result = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight.float()
    if out is None:
        return result.to(x.dtype)
    return out.copy_(result)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Set ``residual += x`` in place, then return the RMSNorm of the stored residual."""
    residual.copy_(residual.float() + x.float())
    return rms_norm(residual, weight, eps, out=out)
