"""Mixture of experts on CPU through the compiled library (cpu/moe.cpp)."""

import torch
from torch import Tensor

from isthmus_kernels import native


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
    """Same contract as `reference.moe_route`."""
    if logits.stride(1) != 1:
        raise ValueError("logits: expected contiguous rows")
    tokens, count = logits.shape
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (count,) or not bias.is_contiguous()):
        raise ValueError(f"bias: expected contiguous fp32 [{count}], got {bias.dtype} {tuple(bias.shape)}")
    weights = torch.empty((tokens, top_k), dtype=torch.float32)
    experts = torch.empty((tokens, top_k), dtype=torch.int32)
    native.entry("moe_route", "13qd")(
        (weights, experts, logits, bias),
        weights.data_ptr(),
        experts.data_ptr(),
        logits.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        tokens,
        count,
        top_k,
        logits.stride(0),
        native.dtype_code(logits.dtype, "logits"),
        renormalize,
        sigmoid,
        *(groups or (0, 0)),
        scale,
    )
    return weights, experts


def _explain(code: int, kept: native.Kept) -> Exception:
    if code == 1:
        return native.out_of_memory(code, kept)
    experts, gate_up = kept[3], kept[4]
    assert experts is not None and gate_up is not None
    low, high = experts.min().item(), experts.max().item()
    return IndexError(f"experts: ids from {low} to {high}, and there are {gate_up.shape[0]} experts")


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
    """Same contract as `reference.moe`."""
    tokens, hidden = x.shape
    count, _, inner = down.shape
    for name, held in (("gate_up", gate_up), ("down", down)):
        if held.dtype != x.dtype or held.stride(2) != 1 or held.stride(1) != held.shape[2]:
            raise ValueError(f"{name}: expected contiguous {x.dtype} matrices, got {held.dtype} {tuple(held.shape)}")
    if experts.dtype != torch.int32 or weights.dtype != torch.float32 or experts.shape != weights.shape:
        raise ValueError(f"experts, weights: expected int32 and float32, got {experts.dtype} and {weights.dtype}")
    if not (x.is_contiguous() and experts.is_contiguous() and weights.is_contiguous()):
        raise ValueError("x, experts, weights: expected contiguous tensors")
    if out is None:
        out = torch.empty_like(x)
    elif out.shape != x.shape or out.dtype != x.dtype or out.stride(1) != 1:
        raise ValueError(f"out: expected {x.dtype} {tuple(x.shape)}, got {out.dtype} {tuple(out.shape)}")
    alpha, most = (0.0, 0.0) if clamp is None else clamp
    native.entry("moe", "19q2d", _explain)(
        (out, x, weights, experts, gate_up, down, gate_up_bias, down_bias),
        out.data_ptr(),
        x.data_ptr(),
        weights.data_ptr(),
        experts.data_ptr(),
        gate_up.data_ptr(),
        down.data_ptr(),
        0 if gate_up_bias is None else gate_up_bias.data_ptr(),
        0 if down_bias is None else down_bias.data_ptr(),
        tokens,
        experts.shape[1],
        hidden,
        inner,
        count,
        gate_up.stride(0),
        down.stride(0),
        out.stride(0),
        native.dtype_code(x.dtype, "x"),
        0 if gate_up_bias is None else native.dtype_code(gate_up_bias.dtype, "gate_up_bias"),
        clamp is not None,
        alpha,
        most,
    )
    return out
