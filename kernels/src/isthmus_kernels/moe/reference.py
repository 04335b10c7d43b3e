"""Definition of expert routing and of the mixture of gated MLPs: one expert at a time."""

import torch
from torch import Tensor


def moe_route(logits: Tensor, top_k: int, *, renormalize: bool = True) -> tuple[Tensor, Tensor]:
    """Return the softmax weights (fp32 ``[T, k]``) and ids (int32 ``[T, k]``) of each row's k best experts."""
    probs = logits.float().softmax(dim=-1)
    # A stable sort: of equal experts the first is the better one.
    ranked = probs.sort(dim=-1, descending=True, stable=True)
    weights = ranked.values[:, :top_k]
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.contiguous(), ranked.indices[:, :top_k].int().contiguous()


def moe(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """Return ``Σ_j weights[t, j] · MLP_experts[t, j](x[t])``; see the README."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():
        token, slot = (experts == expert).nonzero(as_tuple=True)
        gate, up = (x[token].float() @ gate_up[expert].float().T).chunk(2, dim=-1)
        inner = (gate * torch.sigmoid(gate) * up).to(x.dtype).float()
        result = inner @ down[expert].float().T
        total.index_add_(0, token, result * weights[token, slot, None])
    if out is None:
        return total.to(x.dtype)
    return out.copy_(total)
