"""Tables of the rotary position embedding and its stretched variants; `rope_spec` says what they are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .rope_spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int, max_len: int) -> Tensor:
    """fp32 [R / 2]: radians per position of each channel pair, of the R channels that turn, for an engine whose longest
    sequence has `max_len` tokens."""
    dim, theta = rope.rotated(head_dim), rope.theta
    if rope.kind == "dynamic":
        grown = rope.factor * max(max_len, rope.original_max_position) / rope.original_max_position - (rope.factor - 1)
        theta *= grown ** (dim / (dim - 2))
    wavelengths = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.kind == "longrope":
        factors = rope.long_factors if max_len > rope.original_max_position else rope.short_factors
        return 1.0 / (torch.tensor(factors) * wavelengths)
    inverse = 1.0 / wavelengths
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "yarn":
        kept = _kept_by_yarn(rope, dim)
        return inverse / rope.factor * (1 - kept) + inverse * kept
    if rope.kind == "llama3":
        return _llama3(rope, inverse)
    assert rope.kind in ("default", "dynamic"), rope.kind
    return inverse


def _kept_by_yarn(rope: RopeSpec, dim: int) -> Tensor:
    """[R / 2]: 1 where a frequency is kept, 0 where it is divided, in between a ramp."""

    def pair(turns: float) -> float:
        """The channel pair that turns so often within the original context."""
        return dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # A step instead of a division by zero.
    width = high - low or 0.001
    return 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


def _llama3(rope: RopeSpec, inverse: Tensor) -> Tensor:
    # Wavelengths above `longest` are divided by factor, below `shortest` kept, between them blended.
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    wavelength = 2 * math.pi / inverse
    blend = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * inverse / rope.factor + blend * inverse
    stretched = torch.where(wavelength > longest, inverse / rope.factor, inverse)
    return torch.where((wavelength <= longest) & (wavelength >= shortest), blended, stretched)


def cos_sin_tables(rope: RopeSpec, head_dim: int, max_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """fp32 [max_len, R / 2] each, on `device`, for positions 0 .. max_len - 1."""
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inverse_frequencies(rope, head_dim, max_len))
    cos, sin = angles.cos(), angles.sin()
    if rope.attention_factor != 1.0:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    return cos.to(device), sin.to(device)
