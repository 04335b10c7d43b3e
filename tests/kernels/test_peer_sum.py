"""What of the sums over ranks needs no card: their layout and order, their definition, and what they refuse."""

import struct
from pathlib import Path

import pytest
import torch
from compiled_cuda import check_layout

from isthmus_kernels.peer_sum import cuda_impl, reference


def test_layout_and_order_of_calls(tmp_path: Path) -> None:
    check_layout(Path(__file__).parent / "peer_sum_layout_check.cpp", tmp_path)


def test_definition() -> None:
    torch.manual_seed(3)
    parts = [torch.randn(5, 24).bfloat16() for _ in range(3)]
    wide = parts[0].float() + parts[1].float() + parts[2].float()
    assert torch.equal(reference.peer_sum(parts), wide.bfloat16())
    stream, weight = torch.randn(5, 24).bfloat16(), torch.randn(24).bfloat16()
    expected = (wide + stream.float()).bfloat16()
    normed = reference.peer_sum_add_rms_norm(parts, stream, weight, 1e-5)
    assert torch.equal(stream, expected)
    scale = torch.rsqrt(expected.float().square().mean(1, keepdim=True) + 1e-5)
    assert torch.equal(normed, (expected.float() * scale * weight.float()).bfloat16())


@pytest.mark.parametrize(
    ("width", "dtype", "reason"),
    [
        (8, torch.bfloat16, None),
        (5120, torch.bfloat16, None),
        (32_768, torch.float16, None),
        (16_384, torch.float32, None),
        (32_776, torch.bfloat16, "65552 bytes"),
        (12, torch.bfloat16, "24 bytes"),
        (0, torch.bfloat16, "rows of 0"),
        (64, torch.float64, "float64"),
    ],
)
def test_refusals(width: int, dtype: torch.dtype, reason: str | None) -> None:
    said = cuda_impl.refusal(torch.empty(3, width, dtype=dtype))
    assert said is None if reason is None else reason in str(said)


def test_the_call_is_packed_as_the_library_reads_it() -> None:
    assert cuda_impl._CALL.size == 30 * 8 == struct.calcsize("30q")
    assert cuda_impl.inbox_bytes(2, 132, 1 << 17) == 2 * 132 * 131072
    assert cuda_impl.inbox_bytes(8, 1, 16) == 2 * 7 * 16
