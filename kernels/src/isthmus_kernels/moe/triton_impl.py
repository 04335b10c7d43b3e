"""Mixture of experts on a GPU, without the host: route, arrange the pairs by expert, two grouped products, combine.

Few pairs go without the list: each reads its expert's weights (`triton_pairs`). What a product's programs work on is
in the list's tiles, so that grids depend on bounds only and a captured graph follows any routing.
"""

import torch
from torch import Tensor

from isthmus_kernels import batch_invariance
from isthmus_kernels.device import power_of_two
from isthmus_kernels.fp8_linear.triton_impl import quantize
from isthmus_kernels.moe.triton_mxfp4 import PackedPlan, expanded, packed_pairs, packed_product
from isthmus_kernels.moe.triton_pairs import moe_pairs
from isthmus_kernels.moe.triton_product import ProductPlan, combine, grouped_product
from isthmus_kernels.moe.triton_routing import arrange, moe_route

__all__ = ["moe", "moe_route"]

# Pairs up to which each reads its expert's weights.
_FEW_PAIRS = 32
# By mean pairs an expert, up to the bound: the plans of the gated product and of the second one.
_PLANS = (
    (
        6,
        ProductPlan(tile=16, outputs=64, depth=128, warps=4, stages=3),
        ProductPlan(tile=16, outputs=128, depth=128, warps=4, stages=3),
    ),
    (
        24,
        ProductPlan(tile=32, outputs=128, depth=128, warps=8, stages=3),
        ProductPlan(tile=32, outputs=64, depth=128, warps=4, stages=4, listed=True),
    ),
    (
        100,
        ProductPlan(tile=64, outputs=64, depth=64, warps=4, stages=3),
        ProductPlan(tile=64, outputs=128, depth=64, warps=4, stages=4, listed=True),
    ),
    (
        1 << 62,
        ProductPlan(tile=128, outputs=128, depth=64, warps=8, stages=4, halves=True),
        ProductPlan(tile=128, outputs=256, depth=64, warps=8, stages=4, halves=True, listed=True),
    ),
)
# The same of 8-bit factors.
_PLANS_8 = (
    (
        6,
        ProductPlan(tile=16, outputs=64, depth=256, warps=4, stages=3),
        ProductPlan(tile=16, outputs=128, depth=128, warps=4, stages=4),
    ),
    (
        24,
        ProductPlan(tile=32, outputs=64, depth=128, warps=4, stages=4),
        ProductPlan(tile=32, outputs=128, depth=128, warps=4, stages=4),
    ),
    (
        100,
        ProductPlan(tile=128, outputs=64, depth=128, warps=4, stages=3, halves=True),
        ProductPlan(tile=128, outputs=128, depth=128, warps=4, stages=3, halves=True, listed=True),
    ),
    (
        1 << 62,
        ProductPlan(tile=128, outputs=128, depth=128, warps=8, stages=4, halves=True),
        ProductPlan(tile=128, outputs=128, depth=128, warps=4, stages=3, halves=True, listed=True),
    ),
)
# Of 4-bit factors: pairs that go without a list, by mean pairs an expert up to the bound the plans of products that
# unpack as they multiply, and above the last one the plans of bf16, for which the matrices are unpacked first.
_FEW_PAIRS_4 = 12
_PLANS_4 = (
    (12, PackedPlan(tile=16, outputs=64, warps=4, stages=2), PackedPlan(tile=16, outputs=64, warps=4, stages=3)),
    (24, PackedPlan(tile=32, outputs=128, warps=8, stages=3), PackedPlan(tile=32, outputs=64, warps=4, stages=3)),
    (160, PackedPlan(tile=64, outputs=128, warps=8, stages=2), PackedPlan(tile=64, outputs=128, warps=8, stages=3)),
)
# Of any batch, where a row's result must not depend on it: the tensor cores' instruction for 64 rows of the weight.
_ALIKE = ProductPlan(tile=32, outputs=64, depth=64, warps=4, stages=4)
# fp32, whose tiles take twice the memory, for parity with CPUs only.
_WIDE = ProductPlan(tile=16, outputs=64, depth=64, warps=4, stages=2)


def plans(pairs: int, experts: int, dtype: torch.dtype, *, alike: bool = False) -> tuple[ProductPlan, ProductPlan]:
    """How the two products are cut; measured on an H200 (runtime/bench/LOG.md). `alike`: the same for any batch."""
    if alike and dtype != torch.float32:
        return _ALIKE, _ALIKE
    if dtype == torch.float32:
        return _WIDE, _WIDE
    known = _PLANS_8 if dtype == torch.float8_e4m3fn else _PLANS
    return next((first, second) for bound, first, second in known if pairs <= bound * experts)


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
    """Same contract as `reference.moe`."""
    tokens, top_k = experts.shape
    count, hidden = down.shape[:2]
    inner = gate_up.shape[1] // 2
    if out is None:
        out = torch.empty_like(x)
    if tokens == 0:
        return out
    pairs = tokens * top_k
    alike = batch_invariance.required(x.device)
    if gate_up.dtype == torch.uint8:
        assert gate_up_scale is not None and down_scale is not None
        factors = gate_up, down, gate_up_scale, down_scale
        _moe_of_4_bits(x, weights, experts, *factors, gate_up_bias, down_bias, clamp, out)
        return out
    if pairs <= _FEW_PAIRS and not alike:
        moe_pairs(x, weights, experts, gate_up, down, gate_up_bias, down_bias, gate_up_scale, down_scale, clamp, out)
        return out
    first, second = plans(pairs, count, gate_up.dtype, alike=alike)
    order, places, tiles = arrange(experts, count, first.tile)
    between = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    source, scales = _factors(x, gate_up_scale)
    grouped_product(
        between, source, gate_up, gate_up_bias, order, tiles, first, top_k=top_k, gated=True, clamp=clamp, scales=scales
    )
    y = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    source, scales = _factors(between, down_scale)
    grouped_product(y, source, down, down_bias, order, tiles, second, top_k=top_k, gated=False, scales=scales)
    combine(out, y, weights, places, min(1024, power_of_two(hidden)))
    return out


def _moe_of_4_bits(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor,
    down_scale: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    clamp: tuple[float, float] | None,
    out: Tensor,
) -> None:
    """The mixture of experts as `mxfp4` has them."""
    pairs, top_k = experts.numel(), experts.shape[1]
    count, hidden, _ = down.shape
    inner = gate_up.shape[1] // 2
    between = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    if pairs <= _FEW_PAIRS_4:
        factors = gate_up, down, gate_up_scale, down_scale
        packed_pairs(x, between, weights, experts, *factors, gate_up_bias, down_bias, clamp, out)
        return
    y = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    packed = next(((first, second) for bound, first, second in _PLANS_4 if pairs <= bound * count), None)
    if packed is not None:
        order, places, tiles = arrange(experts, count, packed[0].tile)
        listed = order, tiles, packed[0]
        packed_product(between, x, gate_up, gate_up_scale, gate_up_bias, *listed, top_k=top_k, gated=True, clamp=clamp)
        listed = order, tiles, packed[1]
        packed_product(y, between, down, down_scale, down_bias, *listed, top_k=top_k, gated=False)
    else:
        first, second = plans(pairs, count, x.dtype)
        order, places, tiles = arrange(experts, count, first.tile)
        # One after the other, so that one of them is in memory at a time.
        weight = expanded(gate_up, gate_up_scale, hidden)
        grouped_product(between, x, weight, gate_up_bias, order, tiles, first, top_k=top_k, gated=True, clamp=clamp)
        del weight
        weight = expanded(down, down_scale, inner)
        grouped_product(y, between, weight, down_bias, order, tiles, second, top_k=top_k, gated=False)
    combine(out, y, weights, places, min(1024, power_of_two(hidden)))


def _factors(x: Tensor, scale: Tensor | None) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """What is multiplied with a weight of the scales `scale`, and both sides' scales."""
    if scale is None:
        return x, None
    rounded, own = quantize(x)
    return rounded, (own, scale)
