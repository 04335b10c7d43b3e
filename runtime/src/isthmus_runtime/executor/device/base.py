"""What the executor asks of a device: memory, ordered work, events, capture.

Work is ordered: what is enqueued runs after what was enqueued before, and `enqueue` may return before it ran. Only an
`Event` says that it has. Host memory that such work reads or writes (`staging`) must be left alone until then.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import ConfigError

DTYPES = MappingProxyType({"float32": torch.float32, "bfloat16": torch.bfloat16})
KV_DTYPES = MappingProxyType({**DTYPES, "fp8": torch.float8_e4m3fn})
KV_NAMES = MappingProxyType({torch.float32: "fp32", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8_per_token_head"})
"""The pool's element types, as `kv.groups.DTYPES` has them."""

Body = Callable[[], object]
GraphMemory = Any
"""A device's own name for it."""


class Event(Protocol):
    """A point in the order of work."""

    def done(self) -> bool:
        """Whether all work before it has run. Raises what that work raised."""

    def wait(self) -> None:
        """Block until it has. Raises what that work raised."""


class Device(Protocol):
    """One device of this process. `enqueue`, `copy`, `record` and `capture` belong to one thread."""

    name: str
    """As torch spells it: `cpu`, `cuda:0`."""
    torch_device: torch.device
    dtype_varies: bool
    """Whether `auto` may be another dtype on another machine of the same service."""
    multiplies_fp8: bool
    """Whether products of 8-bit floats (E4M3) run on it, and fast."""
    multiplies_mxfp4: bool
    """Whether products of experts that are 4-bit floats with a power of two for each 32 run on it, and fast."""
    reads_fp8: bool
    """Whether its attention reads keys and values that are 8-bit floats."""
    met_tokens: int
    """Steps with prompts of at most so many tokens are captured when their size is first met, padded with nothing."""

    def enter(self) -> None:
        """Make it the calling thread's device, with the threads and the stream of this process. Once a thread."""

    def dtype(self, requested: str) -> torch.dtype:
        """The compute dtype for `--dtype`; `auto` is what the device is fast at."""

    def kv_bytes(self, fraction: float, beside: int = 0) -> int:
        """Memory for the KV pool, now that weights and scratch have theirs. ConfigError when none is left.

        `beside`: bytes that steps are known to take beside the pool and what a device sets aside for them anyhow.
        """

    def overdrawn(self, fraction: float) -> int:
        """Bytes that are taken beyond `fraction`, now that an executor has its pool and has warmed up."""

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory of the device that lives as long as the executor."""

    def pool(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] of zero, aligned to a page. Raises ConfigError when there is not as much."""

    def staging(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Host memory that copies to and from the device run from at full speed, asynchronously."""

    def host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Host memory of zero, to copy from as from staging, and to keep: steps do not reuse it. Any thread."""

    def enqueue(self, body: Body) -> None:
        """Run `body`, whose operations work on this device's memory, after all that was enqueued before."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Within a body: copy between staging and device memory, or within the latter."""

    def record(self) -> Event:
        """The point after everything that was enqueued."""

    def graph_sizes(self, max_rows: int) -> tuple[int, ...]:
        """Batch sizes to capture ahead, ascending, the last at least `max_rows`: others are padded to the next one.

        Empty: any size is captured when it is first met, and nothing is padded.
        """

    def graph_tokens(self, max_tokens: int) -> tuple[int, ...]:
        """Token counts of steps with prompts to capture ahead, ascending, none above `max_tokens`: others are padded to
        the next one. Longer steps are not captured: launching them takes less time than running them."""

    def graph_memory(self) -> GraphMemory:
        """Memory that what is captured next may share, for one executor: it goes when all that was captured with it
        has, and cannot be used again."""

    def capture(self, body: Body, memory: GraphMemory) -> Body | None:
        """Within a body: run `body` once, and return what runs the same operations on the same memory again; None
        when they cannot be repeated so."""

    def explain(self, error: BaseException) -> str:
        """What went wrong, for an operator: what failed, and what to do about it."""


def choose_dtype(requested: str, auto: Callable[[], torch.dtype]) -> torch.dtype:
    """`auto()`, or what was asked for by name. ConfigError when there is no such dtype."""
    if requested == "auto":
        return auto()
    if requested not in DTYPES:
        raise ConfigError(f"--dtype {requested!r} is not supported; known: auto, {', '.join(DTYPES)}")
    return DTYPES[requested]
