"""Rotary embedding and KV write against the reference; bytes outside the slots must stay poisoned."""

import pytest
import torch
from kernel_checks import check_rope

from isthmus_kernels import dispatch, kv_view, native
from isthmus_kernels.device import interpreted
from isthmus_kernels.testing import assert_close, paged_case, poisoned

DTYPES = [torch.float32, torch.bfloat16]
FP8 = torch.float8_e4m3fn
needs_library = pytest.mark.skipif(not native.available(), reason="the compiled library is not built")


def tables(rotary: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(512)[:, None] * 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
    return angles.cos(), angles.sin()


def test_reference_is_a_rotation() -> None:
    cos, sin = tables(64)
    case = paged_case([5], [3], heads=2, kv_heads=1, head_dim=64, block_size=8)
    qkv = torch.randn(5, 4 * 64)
    before = qkv.clone().view(5, 4, 64)
    q = dispatch.rope_kv_write(qkv, case.positions, cos, sin, case.kv, case.slot_mapping, num_heads=2, impl="reference")
    # A rotation keeps lengths, and a dot product depends on the distance of the positions only.
    torch.testing.assert_close(q.norm(dim=-1), before[:, :2].norm(dim=-1))
    as_complex = torch.complex(before[:, :2, :32], before[:, :2, 32:])
    turned = as_complex * torch.polar(torch.ones(5, 32), torch.atan2(sin, cos)[case.positions])[:, None]
    torch.testing.assert_close(q, torch.cat([turned.real, turned.imag], dim=-1), rtol=1e-4, atol=1e-5)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [6, 0])
@pytest.mark.parametrize(("head_dim", "rotary"), [(32, 32), (80, 32), (10, 6)])
@pytest.mark.parametrize("layout", ["block-major", "layer-major"])
def test_compiled_8_bit_floats(
    dtype: torch.dtype, heads: int, head_dim: int, rotary: int, layout: kv_view.Layout
) -> None:
    kinds = {"dtype": dtype, "kv_dtype": FP8, "layout": layout}
    check_rope("cpu", "cpu", tokens=40, heads=heads, kv_heads=3, head_dim=head_dim, rotary=rotary, q_norm=True,
               k_norm=True, **kinds)  # fmt: skip


@pytest.mark.parametrize("impl", ["reference", "triton", *(["cpu"] if native.available() else [])])
def test_numbers_are_rounded_by_heads(impl: str) -> None:
    """Values go to the pool unturned: each is the nearest 8-bit float of its head's scale, whatever its size."""
    if impl == "triton" and not interpreted():
        pytest.skip("kernels are compiled here: tests/gpu has this check")
    heads, dim, tokens = 2, 80, 9
    case = paged_case([tokens], [0], heads=1, kv_heads=heads, head_dim=dim, block_size=8, kv_dtype=FP8)
    cos, sin = tables(32)
    qkv = torch.randn(tokens, (1 + 2 * heads) * dim, generator=torch.Generator().manual_seed(3))
    values = qkv.view(tokens, 1 + 2 * heads, dim)[:, 1 + heads :]
    values *= 10.0 ** torch.arange(-4, 5)[:, None, None]  # one head a thousand times another: each has its scale
    values[1] *= 10.0 ** -torch.linspace(0, 6, dim)  # as far down as numbers are subnormal, and below
    values[2, 0] = 0.0
    values[3, 0, 5] = 3e38
    pages, scales = poisoned(*case.kv.shape, dtype=FP8), poisoned(*case.kv.shape[:4])
    dispatch.rope_kv_write(
        qkv, case.positions, cos, sin, pages, case.slot_mapping, num_heads=1, scales=scales, impl=impl
    )
    block, offset = case.slot_mapping // 8, case.slot_mapping % 8
    numbers, scale = pages[block, 1, offset].float(), scales[block, 1, offset]
    most = values.abs().amax(dim=-1)
    torch.testing.assert_close(scale, most.clamp_min(1e-12) / 448)
    assert bool((numbers.abs().amax(dim=-1) == torch.where(most > 0, 448.0, 0.0)).all())
    got = numbers * scale[..., None]
    # Half the distance of two neighbours: a sixteenth of the number, and 2^-10 of the scale below the least normal one.
    bound = torch.maximum(values.abs() / 16, scale[..., None] * 2**-10) * 1.0001
    assert bool(((got - values).abs() <= bound).all())


@needs_library
def test_what_is_not_finite_stays_so() -> None:
    case = paged_case([3], [0], heads=1, kv_heads=1, head_dim=32, block_size=8, kv_dtype=FP8)
    cos, sin = tables(32)
    for impl in ("reference", "cpu"):
        qkv = torch.randn(3, 3 * 32)
        qkv[0, 70], qkv[1, 80] = float("nan"), float("inf")
        assert case.scales is not None
        dispatch.rope_kv_write(
            qkv, case.positions, cos, sin, case.kv, case.slot_mapping, num_heads=1, scales=case.scales, impl=impl
        )
        row = case.kv[int(case.block_tables[0, 0]), 1, :3, 0].float()
        row = row * case.scales[int(case.block_tables[0, 0]), 1, :3, 0, None]
        assert not row[0, 6].isfinite() and not row[1, 16].isfinite() and row[2].isfinite().all(), impl


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary"), [(32, 32), (64, 64), (80, 32), (96, 96), (128, 128), (10, 6)])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("layout", ["block-major", "layer-major"])
@pytest.mark.parametrize("heads", [6, 0])
def test_compiled(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    rotary: int,
    norm: bool,
    layout: kv_view.Layout,
    heads: int,
) -> None:
    case = paged_case(
        [1, 30, 9],
        [50, 0, 7],
        heads=6,
        kv_heads=3,
        head_dim=head_dim,
        block_size=8,
        kv_dtype=kv_dtype,
        layout=layout,
    )
    slots = case.slot_mapping.clone()
    slots[3] = -1
    cos, sin = tables(rotary)
    q_norm, k_norm = (torch.rand(head_dim), torch.rand(head_dim)) if norm else (None, None)
    qkv = torch.randn(case.tokens, (heads + 6) * head_dim).to(dtype)
    results = []
    for impl in ("reference", "cpu"):
        own = qkv.clone()
        pool = poisoned(*case.pool.shape, dtype=kv_dtype)
        view = kv_view.layer_view(pool, 1, layout)
        q = dispatch.rope_kv_write(
            own,
            case.positions,
            cos,
            sin,
            view,
            slots,
            num_heads=heads,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=1e-5,
            impl=impl,
        )
        assert torch.equal(own[:, heads * head_dim :], qkv[:, heads * head_dim :]), "k and v of the projection changed"
        results.append((q, pool))
    assert_close(results[1][0], results[0][0])
    written = ~results[0][1].isnan()
    assert torch.equal(written, ~results[1][1].isnan()), "bytes outside the slots were written"
    assert_close(results[1][1][written], results[0][1][written])


@needs_library
def test_bad_index_is_named_and_nothing_changes() -> None:
    case = paged_case([4], [0], heads=2, kv_heads=1, head_dim=32, block_size=8)
    cos, sin = tables(32)
    qkv = torch.randn(4, 4 * 32)
    before, pool = qkv.clone(), case.pool.clone()
    slots, positions = case.slot_mapping.clone(), case.positions.clone()
    slots[2] = case.kv.shape[0] * 8
    positions[1] = 512
    with pytest.raises(IndexError, match=r"slot_mapping\[2\]"):
        dispatch.rope_kv_write(qkv, case.positions, cos, sin, case.kv, slots, num_heads=2, impl="cpu")
    with pytest.raises(IndexError, match=r"positions\[1\]"):
        dispatch.rope_kv_write(qkv, positions, cos, sin, case.kv, case.slot_mapping, num_heads=2, impl="cpu")
    assert torch.equal(qkv, before)
    assert torch.equal(pool.nan_to_num(), case.pool.nan_to_num())
