"""What of the CUDA decode kernel needs no card: where it keeps what, its machine code, and which batches it takes."""

from pathlib import Path

import pytest
import torch
from compiled_cuda import assert_in_registers, check_layout, hopper_code

from isthmus_kernels.paged_attention import cuda_decode


def test_layout(tmp_path: Path) -> None:
    check_layout(Path(__file__).parent / "decode_layout_check.cpp", tmp_path)


@pytest.mark.slow
def test_machine_code_keeps_everything_in_registers() -> None:
    kernels = hopper_code("decode9attention", "HMMA.16816.F32")
    assert len(kernels) == 2, "bf16 and fp16, for sm_90a"
    for kernel in kernels:
        assert "LDGSTS" in kernel and "MOVM" in kernel
        # Half of what sixteen rows for the heads would take: 16 products for scores, 16 for the result.
        assert kernel.count("HMMA.16816.F32") == 32
        assert_in_registers(kernel)


@pytest.mark.parametrize(
    ("rows", "heads", "tokens", "taken"),
    [
        (128, 32, 16_384, True),
        (512, 64, 65_536, True),
        (256, 8, 40_960, True),
        (127, 32, 16_384, False),
        (513, 32, 16_384, False),
        (256, 72, 16_384, False),
        (256, 32, 65_552, False),
    ],
)
def test_which_batches_it_takes(rows: int, heads: int, tokens: int, taken: bool) -> None:
    q, kv = torch.empty(rows, heads, 128, device="meta"), torch.empty(9, 2, 16, 8, 128, device="meta")
    assert cuda_decode.takes(q, kv, torch.empty(rows, tokens // 16, device="meta")) is taken
