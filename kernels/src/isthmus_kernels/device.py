"""What the Triton launchers share: how wide the device is, and scratch that is made once and kept.

A captured graph replays the addresses it was captured with, so scratch is never freed or grown in place: a larger
bound is a new allocation beside the old one. Two streams never share scratch; calls on one stream are ordered.
"""

from functools import cache

import torch
from torch import Tensor

# The interpreter runs programs one by one; a small odd number still splits the small contexts of tests.
_INTERPRETED_MULTIPROCESSORS = 5


@cache
def interpreted() -> bool:
    """Say whether Triton was told to interpret kernels on the CPU (before it was imported)."""
    try:
        from triton import knobs
    except ImportError:
        return False
    return bool(knobs.runtime.interpret)


@cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of `device`; a small number in the interpreter."""
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _kept(name: str, stream: int, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    del name, stream
    return torch.zeros(shape, dtype=dtype, device=device)


def scratch(name: str, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the buffer `name` of this shape for the current stream of `device`; zero when it is first made."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _kept(name, stream, device, shape, dtype)


def power_of_two(count: int, at_least: int = 1) -> int:
    """The smallest power of two that is not below `count` nor `at_least` (itself a power of two)."""
    return max(at_least, 1 << max(count - 1, 0).bit_length())
