"""What this machine offers: threads, free memory, and the dtype it multiplies fast."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from ..errors import ConfigError

_LOG = logging.getLogger(__name__)
_CGROUP = Path("/sys/fs/cgroup")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# As torch.cpu.get_capabilities names them: tiles and vectors of x86, and the extension of Arm.
_BF16_ARITHMETIC = ("amx_bf16", "avx512_bf16", "bf16")
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
    """The compute dtype: `float32`, `bfloat16`, or for `auto` what this CPU's instructions are for.

    A CPU without bf16 arithmetic emulates it several times slower, and fp32 loses nothing. What the CPU is asked for
    is what it can do, not how long something takes now: engines on a busy machine would choose differently.
    """
    if requested != "auto":
        if requested not in DTYPES:
            raise ConfigError(f"--dtype {requested!r} is not supported; known: auto, {', '.join(DTYPES)}")
        return DTYPES[requested]
    found = torch.cpu.get_capabilities()
    fast = [name for name in _BF16_ARITHMETIC if found.get(name)]
    chosen = torch.bfloat16 if fast else torch.float32
    _LOG.info("compute dtype %s: this CPU has %s for bfloat16", chosen, ", ".join(fast) or "no instructions")
    return chosen


def _cgroup_text(name: str) -> str:
    try:
        return (_CGROUP / name).read_text(encoding="ascii").strip()
    except OSError:
        # No such controller here: nothing limits us.
        return ""
