"""What of the CUDA product of queries, keys and values needs no card: its machine code and what it refuses."""

from dataclasses import replace

import pytest
import torch
from compiled_cuda import assert_in_registers, hopper_code

from isthmus_kernels.dispatch import Heads
from isthmus_kernels.linear import cuda_impl

BF16 = torch.bfloat16


@pytest.mark.slow
def test_machine_code_keeps_everything_in_registers() -> None:
    (kernel,) = hopper_code("rotated_product")
    assert kernel.count("HGMMA.64x256x16") == 4
    assert "UTMALDG.2D.MULTICAST" in kernel and "UTMASTG" in kernel and "USETMAXREG" in kernel
    assert_in_registers(kernel)


def heads_of(*, dim: int = 128, rotary: int = 128, kv_dtype: torch.dtype = BF16, pad: int = 0, shift: int = 0) -> Heads:
    kv = torch.zeros(2 * 2 * 4 * 2 * (dim + pad) + shift, dtype=kv_dtype)[shift:].view(2, 2, 4, 2, dim + pad)
    table = torch.zeros(8, rotary // 2)
    norm = torch.ones(dim, dtype=BF16)
    tokens = torch.zeros(4, dtype=torch.int64)
    return Heads(
        positions=tokens,
        cos=table,
        sin=table,
        kv=kv[..., :dim],
        slot_mapping=tokens,
        num_heads=4,
        q_norm=norm,
        k_norm=norm,
        eps=1e-6,
        scales=None,
    )


def refusal(heads: Heads, *, columns: int = 128, dtype: torch.dtype = BF16) -> str | None:
    width = (heads.num_heads + 4) * heads.kv.shape[4]
    x, weight, qkv = (torch.empty(shape, dtype=dtype) for shape in ((4, columns), (width, columns), (4, width)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        return cuda_impl.rotated_refusal(x, weight, qkv, heads)


def test_heads_of_its_kind_are_taken() -> None:
    heads = heads_of()
    assert refusal(heads) is None
    assert refusal(heads_of(pad=8)) is None
    assert refusal(replace(heads, q_norm=None)) is None
    assert refusal(replace(heads, q_norm=None, k_norm=None)) is None


@pytest.mark.parametrize(
    ("heads", "reason"),
    [
        (heads_of(kv_dtype=torch.float32), "a pool of torch.float32"),
        (heads_of(dim=64, rotary=64), "heads of 64 channels, 64 of which turn"),
        (heads_of(rotary=64), "heads of 128 channels, 64 of which turn"),
        (replace(heads_of(), num_heads=0), "0 query heads"),
        (replace(heads_of(), num_heads=3), "3 query heads"),
        (heads_of(pad=4), "multiples of 16"),
        (heads_of(shift=4), "multiples of 16"),
        (replace(heads_of(), cos=torch.zeros(8, 65)[:, :64]), "rotary tables"),
        (replace(heads_of(), k_norm=torch.ones(128)), "norms"),
    ],
)
def test_what_the_kernel_cannot_take_is_named(heads: Heads, reason: str) -> None:
    found = refusal(heads)
    assert found is not None and reason in found


def test_matrices_are_refused_as_by_the_gated_product() -> None:
    assert "96 columns" in (refusal(heads_of(), columns=96) or "")
    assert "torch.float16" in (refusal(heads_of(), dtype=torch.float16) or "")
