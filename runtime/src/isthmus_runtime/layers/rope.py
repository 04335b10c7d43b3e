"""Tables of the rotary position embedding (Su et al. 2021) and its stretched variants."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .rope_spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """fp32 [D / 2]: radians per position of each channel pair."""
    inverse = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "default":
        return inverse
    assert rope.kind == "llama3", rope.kind
    # Llama 3.1: wavelengths above `longest` are divided by factor, below `shortest` kept, between them blended.
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
    """fp32 [max_len, D / 2] each, on `device`, for positions 0 .. max_len - 1."""
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    return angles.cos().to(device), angles.sin().to(device)
