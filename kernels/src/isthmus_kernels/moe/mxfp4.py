"""Matrices of 4-bit floats (E2M1), a power of two for every 32 columns (OCP Microscaling 1.0), as kernels have them.

Columns come in blocks of 128, the last filled up with zeros. A block of a row is 64 bytes, of which byte j holds column
j in its lower half and column 64 + j in its upper one: both halves of a run of bytes are runs of columns, so that a
kernel unpacks without moving anything. Its four scales, as they are published (E8M0: the power plus 127), are the bytes
of an int32.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
"""Columns."""
GROUP = 32
"""Columns with one scale."""
MOST_SCALE = 128
"""The largest that a kernel multiplies by: it keeps the product of a power and 2^126 in bf16's range."""
# By its bits: 1 of sign, 2 of exponent, 1 of mantissa.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def blocks_of(columns: int) -> int:
    """Blocks of a row of so many columns."""
    return -(-columns // BLOCK)


def pack_mxfp4(numbers: Tensor, scales: Tensor) -> tuple[Tensor, Tensor] | None:
    """Bytes uint8 ``[..., N, 64 B]`` and scales int32 ``[..., N, B]`` of B blocks; None for a scale above `MOST_SCALE`.

    Args:
        numbers: uint8 ``[..., N, G, 16]``: the G groups of a row, of two columns in turn the first in the lower half.
        scales: uint8 ``[..., N, G]``.
    """
    if bool((scales > MOST_SCALE).any()):
        return None
    groups = scales.shape[-1]
    count = blocks_of(groups * GROUP)
    codes = torch.stack([numbers & 15, numbers >> 4], dim=-1).flatten(-3)
    codes = pad(codes, (0, count * BLOCK - codes.shape[-1])).unflatten(-1, (count, 2, BLOCK // 2))
    packed = (codes[..., 0, :] | codes[..., 1, :] << 4).flatten(-2)
    filled = pad(scales, (0, count * BLOCK // GROUP - groups), value=127)
    return packed, filled.contiguous().view(torch.int32)


def unpack_mxfp4(packed: Tensor, scales: Tensor, columns: int) -> Tensor:
    """The matrix, bf16 ``[..., N, columns]``: exact."""
    values = torch.tensor(_VALUES, dtype=torch.bfloat16, device=packed.device)
    held = packed.unflatten(-1, (-1, BLOCK // 2))
    numbers = torch.cat([values[(held & 15).int()], values[(held >> 4).int()]], dim=-1)
    powers = torch.exp2(scales.contiguous().view(torch.uint8).float() - 127).bfloat16()
    powers = powers.unflatten(-1, (-1, BLOCK // GROUP))
    full = numbers.unflatten(-1, (-1, GROUP)) * powers[..., None]
    matrix: Tensor = full.flatten(-3)[..., :columns].contiguous()
    return matrix
