"""Counter-based noise: a pure function of (seed, position, token), so no generator state exists."""

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (PyTorch's own is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64(x: Tensor) -> Tensor:
    """The splitmix64 finaliser (Steele, Lea, Flood 2014), in wrapping int64 arithmetic."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def uniform(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Uniform numbers in the open interval (0, 1), fp32 ``[B, vocab]``.

    23 bits plus a half step: both ends are excluded and every value is exact in fp32.
    """
    key = mix64(seeds.long() + (positions.long() + 1) * _GOLDEN)
    token = torch.arange(1, vocab + 1, device=seeds.device)
    bits = mix64(key[:, None] + token[None, :] * _GOLDEN)
    return (_shift(bits, 41).float() + 0.5) * 2.0**-23


def gumbel(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise ``-log(-log u)``, fp32 ``[B, vocab]``."""
    return -torch.log(-torch.log(uniform(seeds, positions, vocab)))
