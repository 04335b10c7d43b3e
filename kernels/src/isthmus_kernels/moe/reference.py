"""Definition of expert routing and of the mixture of gated MLPs: one expert at a time."""

import torch
from torch import Tensor

from isthmus_kernels.fp8_linear.reference import quantize
from isthmus_kernels.moe.mxfp4 import unpack_mxfp4


def moe_route(
    logits: Tensor,
    top_k: int,
    *,
    renormalize: bool = True,
    sigmoid: bool = False,
    bias: Tensor | None = None,
    groups: tuple[int, int] | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the weights (fp32 ``[T, k]``) and ids (int32 ``[T, k]``) of each row's k best experts."""
    probs = torch.sigmoid(logits.float()) if sigmoid else logits.float().softmax(dim=-1)
    choice = probs if bias is None else probs + bias
    if groups is not None:
        count, kept = groups
        members = choice.unflatten(1, (count, -1))
        worth = members.topk(1 if bias is None else min(2, members.shape[2]), dim=-1).values.sum(dim=-1)
        best = worth.sort(dim=-1, descending=True, stable=True).indices[:, :kept]
        out = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
        choice = members.masked_fill(out[:, :, None], float("-inf")).flatten(1)
    # A stable sort: of equal experts the first is the better one.
    chosen = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = probs.gather(1, chosen)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return (weights * scale).contiguous(), chosen.int().contiguous()


def gated(both: Tensor, clamp: tuple[float, float] | None) -> Tensor:
    """The activation between an expert's two products, of gate and up ``[..., 2 I]``, in fp32."""
    gate, up = both.float().chunk(2, dim=-1)
    if clamp is None:
        return gate * torch.sigmoid(gate) * up
    alpha, most = clamp
    gate, up = gate.clamp(max=most), up.clamp(-most, most)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def _multiply(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """``x @ weight.T`` in fp32; of an 8-bit weight with x rounded to 8 bits, too; of a 4-bit one with x as it is."""
    if scale is not None and weight.dtype == torch.uint8:
        weight, scale = unpack_mxfp4(weight, scale, x.shape[1]), None
    if scale is None:
        return x.float() @ weight.float().T
    rounded, own = quantize(x)
    return rounded.float() @ weight.float().T * own[:, None] * scale


def moe(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    clamp: tuple[float, float] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``Σ_j weights[t, j] · MLP_experts[t, j](x[t])``; see the README."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():
        token, slot = (experts == expert).nonzero(as_tuple=True)
        both = _multiply(x[token], gate_up[expert], None if gate_up_scale is None else gate_up_scale[expert])
        if gate_up_bias is not None:
            both += gate_up_bias[expert].float()
        inner = gated(both, clamp).to(x.dtype)
        result = _multiply(inner, down[expert], None if down_scale is None else down_scale[expert])
        if down_bias is not None:
            result += down_bias[expert].float()
        total.index_add_(0, token, result * weights[token, slot, None])
    if out is None:
        return total.to(x.dtype)
    return out.copy_(total)
