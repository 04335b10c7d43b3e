"""4-bit floats as kernels multiply them: every number, and every scale that is taken, comes back as it was."""

import pytest
import torch
from kernel_checks import packed_mxfp4, random_mxfp4

from isthmus_kernels import dispatch, dispatch_weights
from isthmus_kernels.moe.mxfp4 import MOST_SCALE, blocks_of, unpack_mxfp4

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


@pytest.mark.parametrize("columns", [32, 128, 288, 2880])
def test_a_matrix_comes_back(columns: int) -> None:
    numbers, scales = random_mxfp4(3, 5, columns, scales=(0, MOST_SCALE + 1))
    packed, words = packed_mxfp4(numbers, scales)
    assert packed.shape == (3, 5, 64 * blocks_of(columns))
    assert words.shape == (3, 5, blocks_of(columns))
    codes = torch.stack([numbers & 15, numbers >> 4], dim=-1).flatten(-2).int()
    want = (VALUES.double()[codes] * 2.0 ** (scales[..., None].double() - 127)).flatten(-2)
    assert torch.equal(unpack_mxfp4(packed, words, columns).double(), want)


def test_what_does_not_belong_together_is_named() -> None:
    x, (weights, experts) = torch.ones(2, 32).bfloat16(), dispatch.moe_route(torch.ones(2, 4), 1)
    gate_up, gate_up_scale = packed_mxfp4(*random_mxfp4(4, 64, 32))
    down, down_scale = packed_mxfp4(*random_mxfp4(4, 32, 32))
    scales = {"gate_up_scale": gate_up_scale, "down_scale": down_scale}
    dispatch.moe(x, weights, experts, gate_up, down, **scales)
    with pytest.raises(ValueError, match="4-bit floats have scales"):
        dispatch.moe(x, weights, experts, gate_up, down)
    with pytest.raises(ValueError, match=r"down_scale: expected contiguous int32 \[4, 32, 1\], got torch.int32 \[4, 3"):
        dispatch.moe(x, weights, experts, gate_up, down, gate_up_scale=gate_up_scale, down_scale=down_scale[:, :3])
    with pytest.raises(ValueError, match=r"multiplied with bfloat16, got torch\.float32"):
        dispatch.moe(x.float(), weights, experts, gate_up, down, **scales)
    with pytest.raises(ValueError, match=r"are not \[E, 2 I, 128\] and \[E, 130, 64"):
        dispatch.moe(torch.ones(2, 130).bfloat16(), weights, experts, gate_up, down, **scales)


def test_a_scale_that_kernels_cannot_multiply_by_is_not_packed() -> None:
    numbers, scales = random_mxfp4(2, 3, 64)
    scales[1, 2, 1] = MOST_SCALE + 1
    assert dispatch_weights.pack_mxfp4(numbers, scales) is None
