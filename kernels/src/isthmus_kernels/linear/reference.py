"""Definition of the linear op: ``y = x W^T + b`` with fp32 accumulation."""

from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias`` in x's dtype; `x` is ``[T, K]``, `weight` ``[N, K]``."""
    result = x.float() @ weight.float().T
    if bias is not None:
        result = result + bias.float()
    if out is None:
        return result.to(x.dtype)
    return out.copy_(result)
