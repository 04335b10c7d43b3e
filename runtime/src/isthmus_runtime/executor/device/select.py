"""Which device this process computes on."""

from __future__ import annotations

import logging

import torch

from ...errors import ConfigError
from .base import Device
from .cpu import CpuDevice
from .cuda import CudaDevice, unusable

_LOG = logging.getLogger(__name__)


def open_device(requested: str, *, threads: int = 0, index: int = 0, deterministic: bool = False) -> Device:
    """The device for `--device`, of GPUs number `index`. `auto` is a GPU where there is one.

    Raises ConfigError when it cannot be used, or cannot compute rows alike in any batch where `deterministic`. That a
    GPU is there and cannot be opened is no reason to compute on the CPU.
    """
    if requested == "cpu":
        return CpuDevice(threads, deterministic=deterministic)
    if requested not in ("auto", "cuda"):
        raise ConfigError(f"--device {requested!r} is not supported; known: auto, cpu, cuda")
    reason = unusable(index)
    if not reason:
        try:
            return CudaDevice(index, deterministic=deterministic)
        except (torch.AcceleratorError, torch.OutOfMemoryError) as e:
            # The first to need the card itself: until here the driver was only asked about it.
            raise ConfigError(
                f"--device {requested}: cuda:{index} cannot be opened ({str(e).splitlines()[0]}); see that no other "
                "process holds it or its memory (nvidia-smi), look for Xid errors in the node's kernel log, or compute "
                "on the CPU with --device cpu"
            ) from e
    if requested == "cuda":
        raise ConfigError(f"--device cuda: {reason}")
    _LOG.info("computing on the CPU: %s", reason)
    return CpuDevice(threads, deterministic=deterministic)
