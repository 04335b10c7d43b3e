"""What the Triton launchers share: how wide the device is, and scratch that is made once and kept.

A captured graph replays the addresses it was captured with, so scratch is never freed or grown in place: a larger
bound is a new allocation beside the old one. It belongs to the device: calls that may run at the same time, on two
streams of one device, are not supported, unless they come from threads that own scratch of their own (`own_scratch`).
"""

import threading
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
def shared_memory(device: torch.device) -> int:
    """Bytes of it that a program of `device` may have; no limit in the interpreter."""
    if device.type != "cuda":
        return 1 << 40
    # torch's stub lacks it.
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


_KEPT: dict[tuple[str, torch.device, tuple[int, ...], torch.dtype, int], Tensor] = {}
_THREAD = threading.local()


def own_scratch(owner: int) -> None:
    """Give calls of this thread the scratch of `owner` from now on, a number of its stream."""
    _THREAD.owner = owner


def scratch(name: str, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the buffer `name` of this shape on `device`; zero when it is first made.

    Raises RuntimeError when it would have to be made while a graph is captured: it would be zeroed by every replay of
    that graph and by no other graph. Run the op once with these shapes before.
    """
    key = (name, device, shape, dtype, getattr(_THREAD, "owner", 0))
    kept = _KEPT.get(key)
    if kept is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{name}: scratch of shape {shape} is missing; run the op once before capturing it")
        kept = _KEPT[key] = torch.zeros(shape, dtype=dtype, device=device)
    return kept


def power_of_two(count: int, at_least: int = 1) -> int:
    """The smallest power of two that is not below `count` nor `at_least` (itself a power of two)."""
    return max(at_least, 1 << max(count - 1, 0).bit_length())
