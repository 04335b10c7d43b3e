"""The CPU as a device: work runs as it is enqueued, memory is the host's, a captured body is a recorded program."""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from isthmus_kernels import native

from ...errors import ConfigError
from .base import Body, GraphMemory, choose_dtype

_LOG = logging.getLogger(__name__)
_CGROUP = Path("/sys/fs/cgroup")


class CpuDevice:
    """`device.base.Device` on the processor."""

    name = "cpu"
    torch_device = torch.device("cpu")
    dtype_varies = True
    multiplies_fp8 = False
    multiplies_mxfp4 = False
    reads_fp8 = True
    met_tokens = 512 if native.available() else 0

    def __init__(self, threads: int = 0, *, deterministic: bool = False) -> None:
        """`deterministic` asks for nothing but the compiled kernels, which compute rows alike in any batch (ADR 25)."""
        if deterministic and not native.available():
            raise ConfigError(
                "--deterministic on: PyTorch's products depend on the batch, and the compiled CPU kernels are missing; "
                "install isthmus-kernels where a C++ compiler is"
            )
        self.threads = usable_threads(threads)

    def enter(self) -> None:
        """OpenMP keeps the number of threads per calling thread."""
        torch.set_num_threads(self.threads)

    def dtype(self, requested: str) -> torch.dtype:
        """`auto`: what this CPU's instructions are for. A CPU without bf16 arithmetic emulates it several times
        slower, and fp32 loses nothing. What the CPU is asked for is what it can do, not how long something takes now:
        engines on a busy machine would choose differently."""
        return choose_dtype(requested, _native_dtype)

    def kv_bytes(self, fraction: float, beside: int = 0) -> int:
        """A share of the free memory. What steps take is of the rest."""
        return int(free_memory_bytes() * fraction)

    def overdrawn(self, fraction: float) -> int:
        """The share was of what was free then; nothing holds the process to it."""
        return 0

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Committed page by page when it is first written."""
        return torch.zeros(shape, dtype=dtype)

    def pool(self, nbytes: int) -> Tensor:
        """Anonymous memory, committed on first write: a large pool costs nothing at start."""
        try:
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as e:
            raise ConfigError(f"the KV pool of {nbytes} bytes cannot be mapped: {e}; lower --kv-memory") from e
        return torch.frombuffer(memory, dtype=torch.uint8)

    def staging(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Plain memory."""
        return torch.zeros(shape, dtype=dtype)

    def host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Plain memory."""
        return torch.zeros(shape, dtype=dtype)

    def enqueue(self, body: Body) -> None:
        """Run it."""
        body()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy now."""
        target.copy_(source)

    def record(self) -> _Past:
        """An event that has happened."""
        return _Past()

    def graph_sizes(self, max_rows: int) -> tuple[int, ...]:
        """A program costs a step of its size and little memory: sizes are recorded as they come."""
        return ()

    def graph_tokens(self, max_tokens: int) -> tuple[int, ...]:
        """Calls are short beside what they compute."""
        return ()

    def graph_memory(self) -> GraphMemory:
        """Programs work on memory that others own."""
        return None

    def capture(self, body: Body, memory: GraphMemory) -> Body | None:
        """Record the compiled operations of `body`, then run them. None where PyTorch computes something, which is not
        recorded: `body` is run as it is then."""
        try:
            with native.record() as program, _NothingComputed():  # type: ignore[no-untyped-call]
                body()
        except _ComputedError:
            program = None
        if program is None or not len(program):
            body()
            return None
        program.run()
        return program.run

    def explain(self, error: BaseException) -> str:
        """The error as Python names it."""
        return f"{type(error).__name__}: {error}"


class _Past:
    """Work on a CPU is done once it is enqueued, and raises there."""

    def done(self) -> bool:
        """Always."""
        return True

    def wait(self) -> None:
        """Nothing to wait for."""


class _ComputedError(Exception):
    """PyTorch was asked to compute something."""


class _NothingComputed(TorchDispatchMode):
    """Stops before PyTorch itself computes. Views and fresh memory are no computation: addresses stay as they were."""

    _FREE = ("aten::empty", "aten::detach", "aten::alias")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here. To say so, torch would import its compiler at the first captured step: it takes
        seconds, and fails where the process's user has no name, as in a container."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not func.name().startswith(self._FREE):
            raise _ComputedError(func.name())
        return func(*args, **(kwargs or {}))


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


def _native_dtype() -> torch.dtype:
    fast = native.multiplies_bf16()
    chosen = torch.bfloat16 if fast else torch.float32
    _LOG.info("compute dtype %s: bfloat16 has %s here", chosen, "AVX512-BF16" if fast else "no compiled arithmetic")
    return chosen


def _cgroup_text(name: str) -> str:
    try:
        return (_CGROUP / name).read_text(encoding="ascii").strip()
    except OSError:
        # No such controller here: nothing limits us.
        return ""
