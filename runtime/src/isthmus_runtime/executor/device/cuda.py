"""One CUDA GPU as a device: a stream, pinned staging, CUDA graphs."""

from __future__ import annotations

import logging
import re
from shutil import which

import torch
from torch import Tensor

from isthmus_kernels import batch_invariance
from isthmus_kernels.device import own_scratch

from ...errors import ConfigError
from .base import Body, GraphMemory, choose_dtype

_LOG = logging.getLogger(__name__)

LEAST_CAPABILITY = (8, 0)
"""Ampere: the first with bf16 arithmetic and asynchronous copies to shared memory, which the kernels use."""
_FP8_CAPABILITY = (8, 9)
"""Ada: the first with products of 8-bit floats."""
_ALIGN = 4096
_HEADROOM = 1 << 30
"""Set aside beside the KV pool: captured graphs, scratch of cuBLAS and of the kernels, logits."""
_LOST = re.compile(
    r"illegal memory access|unspecified launch failure|device-side assert|uncorrectable ECC|GPU is lost|"
    r"unknown error|misaligned address|hardware stack error|system has unsupported|no CUDA-capable device",
    re.IGNORECASE,
)


def unusable(index: int = 0) -> str:
    """Why GPU `index` cannot be used here; empty when it can."""
    if not torch.backends.cuda.is_built():
        return f"this PyTorch ({torch.__version__}) is built without CUDA; install one that is, or use --device cpu"
    try:
        torch.cuda.init()
        if not torch.cuda.device_count():
            return "the driver shows no GPU; give this process one (nvidia.com/gpu in Kubernetes), or use --device cpu"
        if torch.cuda.device_count() <= index:
            shown = torch.cuda.device_count()
            return f"rank {index} needs a GPU of its own and the driver shows {shown}; give this process more of them"
        found = torch.cuda.get_device_capability(index)
    except (RuntimeError, AssertionError) as e:
        # torch's own words name the cause: no driver, one too old (with both versions), a card that does not answer.
        return f"{str(e).splitlines()[0]}; use --device cpu, or repair the driver (nvidia-smi shows its state)"
    if found < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(index)
        least, has = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, found))
        return f"{name} has compute capability {has}, the kernels need {least} or more; use --device cpu"
    if which("gcc") is None and which("clang") is None:
        return "Triton compiles a launcher in C for each kernel, and neither gcc nor clang is on the PATH; install gcc"
    return ""


class CudaDevice:
    """`device.base.Device` on the GPU `index`. All work runs on one stream."""

    dtype_varies = False
    met_tokens = 0
    _planned = (0, 0)
    """Bytes that were taken when the pool was planned, and that were set aside."""
    _pooled = 0
    """Bytes of the pool."""

    def __init__(self, index: int = 0, *, deterministic: bool = False) -> None:
        """`deterministic`: a row's result does not depend on its batch (`isthmus_kernels.batch_invariance`). Products
        of 8-bit and 4-bit floats do, and are not made then."""
        self.name = f"cuda:{index}"
        self.torch_device = torch.device(self.name)
        batch_invariance.switch(self.torch_device, deterministic)
        torch.cuda.set_device(self.torch_device)
        self._stream = torch.cuda.Stream(self.torch_device)
        self.reads_fp8 = torch.cuda.get_device_capability(self.torch_device) >= _FP8_CAPABILITY
        self.multiplies_fp8 = self.reads_fp8 and not deterministic
        self.multiplies_mxfp4 = not deterministic
        properties = torch.cuda.get_device_properties(self.torch_device)
        _LOG.info(
            "%s: %s, %.1f GiB, compute capability %d.%d, %d multiprocessors, CUDA %s",
            self.name,
            properties.name,
            properties.total_memory / 2**30,
            properties.major,
            properties.minor,
            properties.multi_processor_count,
            torch.version.cuda,
        )

    def enter(self) -> None:
        """Device and stream are kept per thread, and the scratch of kernels: a draft model has another stream."""
        torch.cuda.set_device(self.torch_device)
        torch.cuda.set_stream(self._stream)
        own_scratch(self._stream.cuda_stream)

    def dtype(self, requested: str) -> torch.dtype:
        """`auto` is bf16: every supported GPU multiplies it at twice the rate of TF32, and reads half the bytes."""
        return choose_dtype(requested, lambda: torch.bfloat16)

    def kv_bytes(self, fraction: float, beside: int = 0) -> int:
        """`fraction` is of the whole GPU and covers all this process takes: what weights and scratch have taken, and
        what is set aside for graphs and steps, goes off."""
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        taken, aside = total - free, _HEADROOM + beside
        self._planned = taken, aside
        left = int(total * fraction) - taken - aside
        _LOG.info(
            "GPU memory: %.1f GiB, of which %.1f GiB are taken; %.0f%% of it may be used: %.1f GiB for the KV pool, "
            "%.2f GiB for graphs and steps",
            total / 2**30,
            taken / 2**30,
            fraction * 100,
            max(0, left) / 2**30,
            aside / 2**30,
        )
        if left <= 0:
            raise ConfigError(
                f"no memory is left for the KV pool: {taken / 2**30:.1f} of {total / 2**30:.1f} GiB are taken by "
                f"weights, scratch and other processes, graphs and steps need {aside / 2**30:.2f} GiB, and "
                f"--kv-memory-fraction {fraction:g} (gpuMemoryFraction) allows {total * fraction / 2**30:.1f} GiB; "
                "raise it, lower --max-batched-tokens or --max-num-seqs, or use a smaller model or a larger GPU"
            )
        return left

    def overdrawn(self, fraction: float) -> int:
        """With what torch has cached: steps as large as those of the warm-up need it again."""
        torch.cuda.synchronize(self.torch_device)
        free, total = torch.cuda.mem_get_info(self.torch_device)
        taken, (before, aside) = total - free, self._planned
        _LOG.info(
            "GPU memory: graphs and steps took %.2f GiB beside the KV pool, %.2f GiB were set aside; %.1f%% is taken",
            (taken - before - self._pooled) / 2**30,
            aside / 2**30,
            100 * taken / total,
        )
        return max(0, taken - int(total * fraction))

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Made on the device."""
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def pool(self, nbytes: int) -> Tensor:
        """Memory of the KV pool as one allocation, as transports register it."""
        self._pooled = nbytes
        try:
            return torch.zeros(nbytes + _ALIGN, dtype=torch.uint8, device=self.torch_device)[:nbytes]
        except torch.cuda.OutOfMemoryError as e:
            free, total = torch.cuda.mem_get_info(self.torch_device)
            raise ConfigError(
                f"the KV pool of {nbytes / 2**30:.1f} GiB does not fit {self.name}: {free / 2**30:.1f} of "
                f"{total / 2**30:.1f} GiB are free; lower --kv-memory or --kv-memory-fraction (gpuMemoryFraction)"
            ) from e

    def staging(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Pinned."""
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Pinned."""
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def enqueue(self, body: Body) -> None:
        """The body's kernels are launched and this returns; they run on the stream."""
        body()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """On the stream, without waiting for it."""
        target.copy_(source, non_blocking=True)

    def record(self) -> _CudaEvent:
        """Recorded on the stream."""
        # A thread that waits for a blocking event sleeps: its core belongs to the thread that launches.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return _CudaEvent(event)

    def graph_sizes(self, max_rows: int) -> tuple[int, ...]:
        """Close together where a row matters: padding to the next size costs at most a few percent of a step."""
        sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, max_rows + 32, 32)]
        last = next(number for number, size in enumerate(sizes) if size >= max_rows)
        return tuple(sizes[: last + 1])

    def graph_tokens(self, max_tokens: int) -> tuple[int, ...]:
        """In a process that serves, launching the layers of a model of 8 billion one by one takes as long as computing
        some two thousand tokens. From a thousand on, sizes are whole tiles of the products: less would save nothing."""
        sizes = (16, 32, *range(64, 1024, 64), *range(1024, 2049, 128))
        return tuple(size for size in sizes if size <= max_tokens)

    def graph_memory(self) -> GraphMemory:
        """torch's allocators keep a pool's number for good, and refuse it once its last graph is gone."""
        return torch.cuda.graph_pool_handle()

    def capture(self, body: Body, memory: GraphMemory) -> Body | None:
        """Run `body` as it is, so that kernels are compiled and libraries have their scratch; then into a graph."""
        body()
        graph = torch.cuda.CUDAGraph()
        # Other threads may wait for events meanwhile: only this thread's calls are checked.
        graph.capture_begin(pool=memory, capture_error_mode="thread_local")
        try:
            body()
        finally:
            graph.capture_end()
        return graph.replay

    def explain(self, error: BaseException) -> str:
        """Names the cause in the operator's terms; a lost card needs a restart, and maybe another card."""
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, torch.cuda.OutOfMemoryError):
            return (
                f"{self.name} is out of memory ({text}); lower --kv-memory-fraction (gpuMemoryFraction), "
                "--max-batched-tokens or --max-num-seqs, and see that no other process uses this GPU"
            )
        if isinstance(error, torch.AcceleratorError) or _LOST.search(text):
            return (
                f"{self.name} failed and is lost to this process ({text}); the process must be restarted, and if it "
                "happens again look for Xid errors in the node's kernel log"
            )
        return f"{type(error).__name__}: {error}"


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        """Asks the driver."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Sleeps until the driver says so."""
        self._event.synchronize()
