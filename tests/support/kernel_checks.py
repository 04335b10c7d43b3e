"""Checks of one implementation of an op against its reference, on any device: small ones run in Triton's interpreter
(tests/kernels/test_triton.py), real shapes on a card (tests/gpu).

Cases are made on the CPU and moved, so that a device sees the numbers that the interpreter sees.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isthmus_kernels import dispatch, dispatch_logits, dispatch_weights, kv_view
from isthmus_kernels.linear.reference import linear as reference_linear
from isthmus_kernels.moe.mxfp4 import unpack_mxfp4
from isthmus_kernels.sampling.noise import gumbel
from isthmus_kernels.testing import PagedCase, assert_close, paged_case, poisoned, scales_like


def attend(case: PagedCase, impl: str, **options: Any) -> Tensor:
    """Run paged attention into poisoned memory; returns the real rows."""
    out = poisoned(*case.q.shape, dtype=case.q.dtype, device=case.q.device)
    dispatch.paged_attention(
        case.q,
        case.kv,
        case.block_tables,
        case.query_start_loc,
        case.seq_lens,
        scale=case.q.shape[2] ** -0.5,
        max_query_len=case.max_query_len,
        max_seq_len=case.max_seq_len,
        scales=case.scales,
        out=out,
        impl=impl,
        **options,
    )
    assert out[case.tokens :].isnan().all(), "rows past the batch were written"
    return out[: case.tokens]


def check_attention(
    impl: str,
    device: str,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    **shape: Any,
) -> None:
    """With `sinks`, of which one outweighs all keys and one weighs nothing."""
    case = paged_case(query_lens, context_lens, device=device, spare_tokens=2, **shape)
    weights = torch.linspace(-3.0, 3.0, case.q.shape[1])
    weights[0], weights[-1] = 200.0, -200.0
    options = {"window": window, "softcap": softcap, "sinks": weights.to(device) if sinks else None}
    assert_close(attend(case, impl, **options), attend(case, "reference", **options))


def check_rope(
    impl: str,
    device: str,
    *,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    q_norm: bool,
    k_norm: bool,
    layout: kv_view.Layout,
) -> None:
    case = paged_case(
        [tokens],
        [5],
        heads=kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=8,
        kv_dtype=kv_dtype,
        layout=layout,
        device=device,
    )
    slots = case.slot_mapping.clone()
    slots[tokens // 2] = -1
    angles = torch.arange(tokens + 5)[:, None] * 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    norms = [torch.rand(head_dim).to(device) if on else None for on in (q_norm, k_norm)]
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(device, dtype)
    results = []
    for chosen in ("reference", impl):
        own = qkv.clone()
        pool = poisoned(*case.pool.shape, dtype=kv_dtype, device=device)
        scales = None if case.scales is None else scales_like(pool, 1, layout)
        q = dispatch.rope_kv_write(
            own,
            case.positions,
            cos,
            sin,
            kv_view.layer_view(pool, 1, layout),
            slots,
            num_heads=heads,
            q_norm=norms[0],
            k_norm=norms[1],
            eps=1e-5,
            scales=scales,
            impl=chosen,
        )
        assert torch.equal(own[:, heads * head_dim :], qkv[:, heads * head_dim :]), "k and v of the projection changed"
        results.append((q, pool, scales))
    (want_q, want, want_scales), (got_q, got, got_scales) = results
    assert_close(got_q, want_q)
    written = ~want.isnan()
    assert torch.equal(written, ~got.isnan()), "bytes outside the slots were written"
    if got_scales is None or want_scales is None:
        assert_close(got[written], want[written])
        return
    assert torch.equal(got_scales.isnan(), want_scales.isnan()), "scales outside the slots were written"
    assert_close(got_scales[~got_scales.isnan()], want_scales[~want_scales.isnan()])
    assert_same_codes(got[written], want[written])


def assert_same_codes(got: Tensor, want: Tensor) -> None:
    """E4M3 numbers of factors that may differ in their last bits: now and then one is rounded the other way."""
    apart = (got.view(torch.uint8).int() - want.view(torch.uint8).int()).abs()
    assert int((apart > 0).sum()) <= max(1, apart.numel() // 200) and not (apart > 1).any(), apart.max()


def check_norms(impl: str, device: str, rows: int, width: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x = (torch.randn(rows, width + 3) * 5).to(device, dtype)[:, :width]
    weight = torch.rand(width).to(device, weight_dtype)
    out = poisoned(rows, width, dtype=dtype, device=device)
    assert dispatch.rms_norm(x, weight, 1e-5, out=out, impl=impl).data_ptr() == out.data_ptr()
    assert_close(out, dispatch.rms_norm(x, weight, 1e-5, impl="reference"))
    residual = torch.randn(rows, width).to(device, dtype)
    want_residual, own = residual.clone(), x.clone()
    want = dispatch.add_rms_norm(own, want_residual, weight, 1e-5, impl="reference")
    got = dispatch.add_rms_norm(own, residual, weight, 1e-5, out=own, impl=impl)
    assert torch.equal(residual, want_residual)
    assert_close(got, want)


def check_norm_of_parts(device: str, parts: int, rows: int, width: int, dtype: torch.dtype) -> None:
    from isthmus_kernels.rms_norm.triton_impl import add_parts_rms_norm  # needs Triton

    sums = poisoned(parts, rows + 1, width, dtype=torch.float32, device=device)[:, :rows]
    sums.copy_(torch.randn(parts, rows, width))
    residual, weight = torch.randn(rows, width).to(device, dtype), torch.rand(width).to(device, dtype)
    want_residual = (residual.float() + sums.sum(dim=0)).to(dtype)
    out = poisoned(rows, width, dtype=dtype, device=device)
    add_parts_rms_norm(sums, residual, weight, 1e-5, out)
    assert_close(residual, want_residual)
    assert_close(out, dispatch.rms_norm(residual, weight, 1e-5, impl="reference"))


def check_gated(impl: str, device: str, rows: int, width: int, dtype: torch.dtype) -> None:
    x = (torch.randn(rows, 2 * width) * 4).to(device, dtype)
    x[:, :1], x[1:2, :1] = 200.0, -200.0
    # Beside a gate that is not small: what rounds in the reference's 1 + tanh would grow with it.
    x[:1, width - 1 : width], x[:1, -1:] = 1.0, -1e4
    for op in (dispatch.silu_mul, dispatch.gelu_tanh_mul):
        out = poisoned(rows, width + 4, dtype=dtype, device=device)
        op(x, out=out[:, :width], impl=impl)
        # In fp64: in fp32 1 + tanh(a) loses its digits below -4, and what it is multiplied with may be large.
        assert_close(out[:, :width], op(x.double(), impl="reference").to(dtype))
        assert out[:, width:].isnan().all(), "columns past the output were written"


def check_lora(
    impl: str, device: str, rows: int, inputs: int, widths: tuple[int, ...], rank: int, dtype: torch.dtype
) -> None:
    outputs, slots = sum(widths), 5
    x = torch.randn(rows, inputs).to(device, dtype)
    a = (torch.randn(slots, len(widths), rank, inputs) / inputs**0.5).to(device, dtype)
    b = (torch.randn(slots, rank, outputs) / rank**0.5).to(device, dtype)
    starts = tuple(sum(widths[:part]) for part in range(len(widths)))
    # A prompt of one adapter, then rows of all of them and of none.
    own = torch.randint(0, slots, (rows,), dtype=torch.int32)
    own[: rows // 2] = 2
    x[(own == 0).to(device)] = torch.nan
    a[slots - 1], b[slots - 1] = torch.nan, torch.nan
    out = poisoned(rows, outputs + 8, dtype=dtype, device=device)
    before = torch.randn(rows, outputs).to(device, dtype)
    out[:, :outputs] = before
    dispatch.lora(x, out[:, :outputs], own.to(device), a, b, starts, impl=impl)
    want = before.cpu().clone()
    dispatch.lora(x.cpu(), want, own, a.cpu(), b.cpu(), starts, impl="reference")
    assert_close(out[:, :outputs], want.to(device))
    assert torch.equal(out[:, :outputs].cpu()[own == 0], before.cpu()[own == 0]), "rows without an adapter were changed"
    assert out[:, outputs:].isnan().all(), "columns past the output were written"


def check_embedding(
    impl: str, device: str, count: int, width: int, dtype: torch.dtype, table_dtype: torch.dtype
) -> None:
    table = torch.randn(count, width).to(device, table_dtype)
    ids = torch.tensor([count - 1, 0, 0, count // 2], dtype=torch.int32, device=device)
    for scale in (1.0, 3.5):
        out = poisoned(4, width + 4, dtype=dtype, device=device)
        dispatch.embedding(table, ids, scale=scale, out=out[:, :width], impl=impl)
        want = torch.empty(4, width, dtype=dtype, device=device)
        assert_close(out[:, :width], dispatch.embedding(table, ids, scale=scale, out=want, impl="reference"))
        assert out[:, width:].isnan().all(), "columns past the output were written"
    outside = torch.tensor([count, -1], dtype=torch.int32, device=device)
    out = torch.zeros(2, width, dtype=dtype, device=device)
    assert dispatch.embedding(table, outside, out=out, impl=impl).isnan().all()


def check_block_copy(impl: str, device: str, block_dim: int, src: Sequence[int], dst: Sequence[int]) -> None:
    shape = [2, 2, 4, 3, 8]
    shape.insert(block_dim, 7)
    pool = torch.randn(shape).to(device, torch.bfloat16)
    want = pool.clone()
    for a, b in zip(src, dst, strict=True):
        want.select(block_dim, b).copy_(pool.select(block_dim, a))
    dispatch.block_copy(pool, src, dst, block_dim=block_dim, impl=impl)
    assert torch.equal(pool, want)


def sampling_args(rows: int, filters: Sequence[str], device: str, seed: int, vocab: int) -> dict[str, Tensor]:
    """Arguments of `sample` for any number of rows: each row another mixture, the first one greedy."""
    generator = torch.Generator().manual_seed(seed)
    repeated = {
        "temperature": torch.tensor([0.0, 0.5, 1.0, 1.5, 0.1, 1.0]),
        "top_k": torch.tensor([0, 1, 5, -1, vocab, vocab + 5], dtype=torch.int32),
        "top_p": torch.tensor([0.5, 0.9, 1.0, 0.3, 0.99, 0.0]),
        "min_p": torch.tensor([0.0, 0.1, 0.5, 0.0, 0.01, 1.0]),
    }
    args = {
        name: values.repeat(-(-rows // 6))[:rows].to(device)
        for name, values in repeated.items()
        if name == "temperature" or name in filters
    }
    args["seeds"] = torch.randint(-(2**62), 2**62, (rows,), generator=generator).to(device)
    args["positions"] = torch.randint(0, 100_000, (rows,), generator=generator).to(device)
    return args


def check_draws(logits: Tensor, tokens: Tensor, args: dict[str, Tensor]) -> None:
    """Hold each row's token against its kept set in fp64, give or take what fp32 may round at the set's edge."""
    heat = args["temperature"]
    greedy = heat == 0
    assert torch.equal(tokens[greedy], logits[greedy].argmax(dim=-1))
    z = (logits / torch.where(greedy, 1.0, heat)[:, None]).double()
    least = torch.full_like(heat, float("-inf")).double()
    if "min_p" in args:
        least = torch.maximum(least, z.amax(dim=-1) + args["min_p"].double().log())
    ranked = z.sort(dim=-1, descending=True).values
    vocab = z.shape[1]
    if "top_k" in args:
        on = (args["top_k"] > 0) & (args["top_k"] < vocab)
        place = torch.where(on, args["top_k"].long(), vocab) - 1
        least = torch.where(on, torch.maximum(least, ranked.gather(1, place[:, None])[:, 0]), least)
    edges = [least + 1e-5, least - 1e-5]  # of what is kept for sure, and perhaps
    if "top_p" in args:
        kept = ranked.masked_fill(ranked < least[:, None] - 1e-12, float("-inf"))
        weights = kept.softmax(dim=-1)
        above = (weights.cumsum(dim=-1) - weights).gather(1, torch.searchsorted(-ranked, -ranked))
        for index, slack in enumerate((1 - 1e-4, 1 + 1e-4)):
            part = args["top_p"].double()[:, None]
            inside = (above < (part * slack).clamp_min(1e-30)) | (part >= 1)
            lowest = ranked.masked_fill(~inside, float("inf")).amin(dim=-1)
            edges[index] = torch.maximum(edges[index], lowest)
    noisy = z + gumbel(args["seeds"], args["positions"], vocab)
    own, own_noisy = (x.gather(1, tokens[:, None])[:, 0] for x in (z, noisy))
    best = noisy.masked_fill(z < edges[0][:, None], float("-inf")).amax(dim=-1)
    assert ((own >= edges[1]) | greedy).all(), "a token outside the filters was drawn"
    assert ((own_noisy >= best - 1e-4) | greedy).all(), "a token that scored higher was not drawn"


def check_sample(
    impl: str, device: str, rows: int, vocab: int, filters: Sequence[str], *, coarse: bool, holes: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    if coarse:
        logits = logits.round()  # ties
    if holes:
        logits[:, 1::3] = float("-inf")
    logits = logits.to(device)
    args = sampling_args(rows, filters, device, seed, vocab)
    drawn = dispatch_logits.sample(logits, impl=impl, **args)
    if vocab < 1000:
        assert drawn.tolist() == dispatch_logits.sample(logits, impl="reference", **args).tolist()
    check_draws(logits, drawn, args)
    assert dispatch_logits.sample(logits, impl=impl).tolist() == logits.argmax(dim=-1).tolist()


def check_logprobs(impl: str, device: str, rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(rows, vocab) * 4).to(device, dtype)
    logits[:, ::5] = float("-inf")
    tokens = torch.randint(0, vocab, (rows,)).to(device) // 5 * 5 + 1
    got = dispatch_logits.logprobs(logits, tokens % vocab, 3, impl=impl)
    want = dispatch_logits.logprobs(logits, tokens % vocab, 3, impl="reference")
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def check_linear(
    impl: str, device: str, rows: int, outputs: int, columns: int, dtype: torch.dtype, *, with_bias: bool
) -> None:
    x = torch.randn(rows, columns + 8).to(device, dtype)[:, :columns]
    weight = (torch.randn(outputs, columns) / columns**0.5).to(device, dtype)
    bias = torch.randn(outputs).to(device, dtype) if with_bias else None
    packed = dispatch_weights.pack(weight, bias, impl=impl)
    want = dispatch.linear(x, dispatch_weights.pack(weight, bias, impl="torch")) if outputs > 10_000 else None
    if want is None:
        want = reference_linear(x, weight, bias)
    wide = poisoned(rows, outputs + 4, dtype=dtype, device=device)
    dispatch.linear(x, packed, out=wide[:, :outputs])
    assert_close(wide[:, :outputs], want)
    assert wide[:, outputs:].isnan().all(), "columns past the output were written"
    # Twice: what a kernel keeps between calls must be as it found it. Into rows of the same stride, since cuBLAS may
    # choose another algorithm, and so another rounding, for others.
    again = poisoned(rows, outputs + 4, dtype=dtype, device=device)
    dispatch.linear(x, packed, out=again[:, :outputs])
    assert torch.equal(again[:, :outputs], wide[:, :outputs])


def check_fp8(impl: str, device: str, rows: int, outputs: int, columns: int, *, with_bias: bool) -> None:
    """Rounding of rows, and a product of 8-bit factors."""
    bf16 = torch.bfloat16
    x = (torch.randn(rows, columns + 8) * torch.rand(rows, 1)).to(device, bf16)[:, :columns]
    x[:1] = 0
    rounded, scales = dispatch_weights.quantize(x, impl=impl)
    want, want_scales = dispatch_weights.quantize(x, impl="reference")
    assert torch.equal(scales, want_scales)
    # A device may divide by a reciprocal: one that lies between two numbers may fall to either.
    assert (rounded.float() != want.float()).sum() <= 1e-3 * rows * columns
    weight, scale = dispatch_weights.quantize(
        (torch.randn(outputs, columns) / columns**0.5).to(device), impl="reference"
    )
    bias = torch.randn(outputs).to(device, bf16) if with_bias else None
    packed = dispatch_weights.pack_fp8(weight, scale, bias, dtype=bf16, impl=impl)
    wide = poisoned(rows, outputs + 8, dtype=bf16, device=device)
    dispatch.linear(x, packed, out=wide[:, :outputs])
    assert wide[:, outputs:].isnan().all(), "columns past the output were written"
    rows_as_they_are = weight.float() * scale[:, None]
    definition = dispatch.linear(x, dispatch_weights.pack_fp8(weight, scale, bias, dtype=bf16, impl="reference"))
    # One row is not rounded. Many rows are summed by tensor cores in about 14 bits (DeepSeek-V3's report, arXiv
    # 2412.19437, 3.3.2), and the library rounds the sum before it adds the bias, so where both nearly cancel, much of
    # a number is rounding: few numbers may be apart by more than their last bit, and the whole may not.
    want = reference_linear(x, rows_as_they_are, bias) if rows == 1 else definition
    got = wide[:, :outputs].float()
    torch.testing.assert_close(got, want.float(), rtol=1.6e-2, atol=5e-2)
    apart = (got - want.float()).abs() > 1.6e-2 * want.float().abs() + 1e-2
    assert int(apart.sum()) <= 1e-4 * apart.numel(), int(apart.sum())
    assert float((got - want.float()).norm()) <= 5e-3 * float(want.float().norm())


def check_moe(
    impl: str, device: str, tokens: int, count: int, top_k: int, hidden: int, inner: int, dtype: torch.dtype
) -> None:
    logits = (torch.randn(tokens, count) * 2).to(device, dtype)
    logits[:, 1] = logits[:, 2]  # ties
    for renormalize in (False, True):
        weights, experts = dispatch.moe_route(logits, top_k, renormalize=renormalize, impl=impl)
        want_weights, want_experts = dispatch.moe_route(logits, top_k, renormalize=renormalize, impl="reference")
        assert torch.equal(experts, want_experts)
        torch.testing.assert_close(weights, want_weights, rtol=1e-5, atol=1e-6)
    x = torch.randn(tokens, hidden).to(device, dtype)
    gate_up = (torch.randn(count, 2 * inner, hidden) / hidden**0.5).to(device, dtype)
    down = (torch.randn(count, hidden, inner) / inner**0.5).to(device, dtype)
    # Weights of experts that nobody chose must not be read.
    idle = [expert for expert in range(count) if expert not in experts.unique().tolist()]
    gate_up[idle], down[idle] = float("nan"), float("nan")
    biases = {
        "gate_up_bias": torch.randn(count, 2 * inner).to(device, dtype),
        "down_bias": torch.randn(count, hidden).to(device, dtype),
    }
    options: tuple[dict[str, Any], ...] = ({}, {**biases, "clamp": (1.702, 0.8)})
    for given in options:
        out = poisoned(tokens, hidden, dtype=dtype, device=device)
        dispatch.moe(x, weights, experts, gate_up, down, out=out, impl=impl, **given)
        # Two products with a rounding between them: twice the tolerance of one.
        assert_close(out / 2, dispatch.moe(x, weights, experts, gate_up, down, impl="reference", **given) / 2)


def random_mxfp4(*shape: int, scales: tuple[int, int] = (116, 124)) -> tuple[Tensor, Tensor]:
    """Random 4-bit floats, uint8 [..., N, G, 16], and their scales, uint8 [..., N, G], as they are published."""
    *rows, columns = shape
    numbers = torch.randint(0, 256, (*rows, columns // 32, 16)).to(torch.uint8)
    return numbers, torch.randint(*scales, (*rows, columns // 32)).to(torch.uint8)


def packed_mxfp4(numbers: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """What kernels multiply."""
    packed = dispatch_weights.pack_mxfp4(numbers, scales)
    assert packed is not None
    return packed


def check_moe_of_4_bits(impl: str, device: str, tokens: int, count: int, top_k: int, hidden: int, inner: int) -> None:
    logits = torch.randn(tokens, count).to(device, torch.bfloat16)
    weights, experts = dispatch.moe_route(logits, top_k, impl="reference")
    x = torch.randn(tokens, hidden).to(device, torch.bfloat16)
    idle = [expert for expert in range(count) if expert not in experts.unique().tolist()]
    packed, plain = {}, {}
    for name, shape in (("gate_up", (count, 2 * inner, hidden)), ("down", (count, hidden, inner))):
        numbers, scales = random_mxfp4(*shape)
        held, words = packed_mxfp4(numbers.to(device), scales.to(device))
        plain[name] = unpack_mxfp4(held, words, shape[2])
        # Of experts that nobody chose nothing is read, and of the others nothing past the last column counts.
        held[idle], plain[name][idle] = 255, float("nan")
        words[idle] = torch.tensor([255] * 4, dtype=torch.uint8).view(torch.int32).to(device)
        packed |= {name: held, f"{name}_scale": words}
    biases = {
        "gate_up_bias": torch.randn(count, 2 * inner).to(device, torch.bfloat16),
        "down_bias": torch.randn(count, hidden).to(device, torch.bfloat16),
    }
    options: tuple[dict[str, Any], ...] = ({}, {**biases, "clamp": (1.702, 7.0)})
    for given in options:
        out = poisoned(tokens, hidden, dtype=torch.bfloat16, device=device)
        dispatch.moe(x, weights, experts, **packed, out=out, impl=impl, **given)
        want = dispatch.moe(x, weights, experts, **plain, impl="reference", **given)
        scale = float(want.float().square().mean().sqrt()) if tokens else 1.0
        assert_close(out / 2 / scale, want / 2 / scale)


def check_moe_of_8_bits(impl: str, device: str, tokens: int, count: int, top_k: int, hidden: int, inner: int) -> None:
    weights, experts = dispatch.moe_route(torch.randn(tokens, count).to(device, torch.bfloat16), top_k, impl=impl)
    x = torch.randn(tokens, hidden).to(device, torch.bfloat16)
    factors = {}
    for name, shape in (("gate_up", (count, 2 * inner, hidden)), ("down", (count, hidden, inner))):
        rounded, scale = dispatch_weights.quantize(
            (torch.randn(shape) / shape[2] ** 0.5).flatten(0, 1).to(device), impl=impl
        )
        factors |= {name: rounded.view(shape), f"{name}_scale": scale.view(shape[:2])}
    out = poisoned(tokens, hidden, dtype=torch.bfloat16, device=device)
    dispatch.moe(x, weights, experts, **factors, out=out, impl=impl)
    want = dispatch.moe(x, weights, experts, **factors, impl="reference")
    exact = dispatch.moe(
        x,
        weights,
        experts,
        *(factors[name].float() * factors[f"{name}_scale"][..., None] for name in ("gate_up", "down")),
        impl="reference",
    )
    # Either what the definition rounds is rounded, or, for few pairs, not. Two inner activations apart by the last
    # bit of bf16 (2^-9) are rounded to different 8-bit numbers (2^-4 apart) in about one case of 32: that alone is
    # 2^-4 / sqrt(32) = 1.1% of the norm. A wrong scale or weight of a single expert of eight is more than 10%.
    apart = min(float((out.float() - other.float()).norm() / other.float().norm()) for other in (want, exact))
    assert apart <= 2e-2, apart
