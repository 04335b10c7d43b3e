"""What this machine offers: threads, free memory, and the dtype it multiplies fast."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from time import perf_counter

import torch

from ..errors import ConfigError

_LOG = logging.getLogger(__name__)
_CGROUP = Path("/sys/fs/cgroup")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KV_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def usable_threads(requested: int) -> int:
    """Threads to compute with: what was asked for, else the scheduler affinity capped by the cgroup's CPU quota."""
    if requested:
        return requested
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_text("cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        cpus = min(cpus, max(1, int(quota[0]) // int(quota[1])))
    return cpus


def free_memory_bytes() -> int:
    """Memory this process may still take: what the kernel can hand out, capped by the cgroup's limit."""
    free = 0
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit = _cgroup_text("memory.max")
    if limit and limit != "max":
        used = int(_cgroup_text("memory.current") or 0)
        # Page cache counts as used, but is given back under pressure.
        for line in _cgroup_text("memory.stat").splitlines():
            name, _, value = line.partition(" ")
            used -= int(value) if name == "inactive_file" else 0
        free = min(free, int(limit) - used)
    return max(0, free)


def choose_dtype(requested: str) -> torch.dtype:
    """The compute dtype: `float32`, `bfloat16`, or for `auto` the faster one on a product of typical shape.

    bf16 must be clearly faster to be chosen: a CPU without bf16 arithmetic emulates it several times slower, and fp32
    loses nothing.
    """
    if requested != "auto":
        if requested not in DTYPES:
            raise ConfigError(f"--dtype {requested!r} is not supported; known: auto, {', '.join(DTYPES)}")
        return DTYPES[requested]
    seconds = {dtype: _product_seconds(dtype) for dtype in DTYPES.values()}
    chosen = torch.bfloat16 if seconds[torch.bfloat16] * 1.3 < seconds[torch.float32] else torch.float32
    _LOG.info(
        "compute dtype %s (a 256x1024x1024 product takes %.2f ms in float32, %.2f ms in bfloat16)",
        chosen,
        seconds[torch.float32] * 1e3,
        seconds[torch.bfloat16] * 1e3,
    )
    return chosen


def _product_seconds(dtype: torch.dtype) -> float:
    x, weight = torch.ones(256, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
    best = float("inf")
    for _ in range(3):
        start = perf_counter()
        torch.nn.functional.linear(x, weight)
        best = min(best, perf_counter() - start)
    return best


def _cgroup_text(name: str) -> str:
    try:
        return (_CGROUP / name).read_text(encoding="ascii").strip()
    except OSError:
        # No such controller here: nothing limits us.
        return ""
