"""What of the CUDA prefill kernel needs no card: where it keeps what, ranges of keys, and what it refuses."""

from pathlib import Path

import pytest
import torch
from compiled_cuda import assert_in_registers, check_layout, hopper_code

from isthmus_kernels.paged_attention import cuda_impl


def test_layout(tmp_path: Path) -> None:
    check_layout(Path(__file__).parent / "prefill_layout_check.cpp", tmp_path)


@pytest.mark.slow
def test_machine_code_keeps_everything_in_registers() -> None:
    kernels = hopper_code("prefill9attention")
    assert len(kernels) == 2, "bf16 and fp16, for sm_90a"
    for kernel in kernels:
        assert "UTMALDG" in kernel and "USETMAXREG" in kernel
        assert_in_registers(kernel)


def refusal(
    *,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 128,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype = torch.bfloat16,
    width: int | None = None,
    shift: int = 0,
    capability: tuple[int, int] = (9, 0),
    window: int | None = None,
) -> str | None:
    width = heads * head_dim if width is None else width
    rows = torch.empty(4 * width + 8, dtype=dtype)[shift : shift + 4 * width].view(4, width)
    q = rows[:, : heads * head_dim].view(4, heads, head_dim)
    kv = torch.empty(3, 2, block_size, kv_heads, head_dim, dtype=kv_dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return cuda_impl.refusal(q, kv, torch.empty_like(q), window=window, softcap=None, sinks=None)


def test_a_slice_of_a_fused_projection_is_taken() -> None:
    assert refusal() is None
    assert refusal(width=12 * 128) is None
    assert refusal(dtype=torch.float16, kv_dtype=torch.float16, block_size=256) is None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"window": 100}, "window"),
        ({"head_dim": 64}, "head_dim 64"),
        ({"dtype": torch.float32}, "torch.float32"),
        ({"kv_dtype": torch.float16}, "torch.float16"),
        ({"block_size": 4}, "block size 4"),
        ({"block_size": 24}, "block size 24"),
        ({"heads": 129, "kv_heads": 1}, "129 query heads"),
        ({"width": 12 * 128 + 4}, "multiples of 16"),
        ({"shift": 4}, "multiple of 16"),
        ({"capability": (10, 0)}, "capability 9.0"),
    ],
)
def test_what_the_kernel_cannot_take_is_named(arguments: dict[str, object], reason: str) -> None:
    found = refusal(**arguments)  # type: ignore[arg-type]
    assert found is not None and reason in found
