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


def gated(both: Tensor, clamp: tuple[float, float] | None) -> Tensor:
    """The activation between an expert's two products, of gate and up ``[..., 2 I]``, in fp32."""
    gate, up = both.float().chunk(2, dim=-1)
    if clamp is None:
        return gate * torch.sigmoid(gate) * up
    alpha, most = clamp
    gate, up = gate.clamp(max=most), up.clamp(-most, most)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def moe(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    clamp: tuple[float, float] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``Σ_j weights[t, j] · MLP_experts[t, j](x[t])``; see the README."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():
        token, slot = (experts == expert).nonzero(as_tuple=True)
        both = x[token].float() @ gate_up[expert].float().T
        if gate_up_bias is not None:
            both += gate_up_bias[expert].float()
        inner = gated(both, clamp).to(x.dtype).float()
        result = inner @ down[expert].float().T
        if down_bias is not None:
            result += down_bias[expert].float()
        total.index_add_(0, token, result * weights[token, slot, None])
    if out is None:
        return total.to(x.dtype)
    return out.copy_(total)
