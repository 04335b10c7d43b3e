"""What copies between host and GPU cost a decode step beside them: of swaps (kv_swap.py), and of the hardware's own.

Plain copies are the floor of what a swap can cost: `cudaMemcpyAsync` of consecutive pinned memory by the copy engine,
without a kernel, without fragments, without ids. What they cost a step, no swap at that rate can save it.
"""

import ctypes
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from isthmus_kernels.kv_swap.geometry import DIRECTIONS, Direction
from isthmus_kernels.kv_swap.swap import Done

__all__ = ["BYTES", "DIRECTIONS", "DecodeStep", "plain_copies"]

BYTES = 256 << 20
_STEPS = 300
# About a second: a card that was idle lowers its clock for some 40 steps after half a second of work.
_SETTLE = 600
_WRITE_COMBINED = 4


class DecodeStep:
    """A graph of the matrix products of 16 layers of Qwen3-8B at 64 rows, which read 6.2 GB of weights."""

    def __init__(self) -> None:
        shapes = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]
        weights = [[torch.randn(n, k, dtype=torch.bfloat16, device="cuda") for n, k in shapes] for _ in range(16)]
        inputs = {k: torch.randn(64, k, dtype=torch.bfloat16, device="cuda") for _, k in shapes}

        def step() -> None:
            for layer in weights:
                for weight in layer:
                    torch.nn.functional.linear(inputs[weight.shape[1]], weight)

        step()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            step()
        self._weights = weights, inputs
        list(self.times(50))

    def times(self, count: int) -> Iterator[float]:
        """Seconds of each of `count` steps, enqueued a few ahead as an engine does."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for i in range(count):
            self._graph.replay()
            events[i + 1].record()
            if i >= 3:
                events[i - 3].synchronize()
        events[-1].synchronize()
        for a, b in itertools.pairwise(events):
            yield a.elapsed_time(b) / 1e3

    def beside(self, label: str, submit: Callable[[], Done], nbytes: int, ahead: int = 3) -> dict[str, Any]:
        """Measure and print steps while `ahead` copies of `nbytes` are always submitted, and steps alone right before
        and after: their clock falls and rises."""
        list(self.times(_SETTLE))
        alone = list(self.times(_STEPS // 2))
        with _Feed(submit, ahead) as feed:
            before, begin = feed.completed, time.perf_counter()
            loaded = sorted(self.times(_STEPS))
            rate = (feed.completed - before) * nbytes / (time.perf_counter() - begin) / 1e9
        alone = sorted(alone + list(self.times(_STEPS // 2)))
        p50, p99 = (loaded[int(_STEPS * q)] / alone[int(_STEPS * q)] - 1 for q in (0.5, 0.99))
        print(
            f"under load, {label:58} step {alone[_STEPS // 2] * 1e3:.3f} ms, p50 {p50:+.1%}, p99 {p99:+.1%}, "
            f"{rate:.1f} GB/s",
            flush=True,
        )
        return {"what": label, "p50": p50, "p99": p99, "gbps": rate}


class _Feed:
    """A thread that keeps a few copies submitted, one after the other, beside whatever else is going on."""

    def __init__(self, submit: Callable[[], Done], ahead: int) -> None:
        self.completed = 0
        self._submit, self._ahead = submit, ahead
        self._stop = threading.Event()
        self._running = threading.Event()
        self._thread = threading.Thread(target=self._feed)

    def _feed(self) -> None:
        dones: deque[Done] = deque()
        while not self._stop.is_set():
            dones.append(self._submit())
            if len(dones) >= self._ahead:
                dones.popleft().synchronize()
                self.completed += 1
                self._running.set()
        for done in dones:
            done.synchronize()

    def __enter__(self) -> "_Feed":
        self._thread.start()
        self._running.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class _Plain:
    """Copies of `count` pieces of `piece` bytes from one end of both buffers on, over some streams in turn."""

    def __init__(
        self,
        direction: Direction,
        device: int,
        host: int,
        *,
        piece: int = BYTES,
        count: int = 1,
        streams: int = 1,
        priority: int = -5,
        device_bytes: int = BYTES,
        pause_s: float = 0.0,
    ) -> None:
        self._copy = ctypes.CDLL("libcudart.so.13").cudaMemcpyAsync
        self._copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        self._kind = 1 if direction == "in" else 2
        self._streams = [torch.cuda.Stream(priority=priority) for _ in range(streams)]
        self._pieces = [(device + i * piece % device_bytes, host + i * piece, piece) for i in range(count)]
        self._pause = threading.Event(), pause_s
        self.nbytes = piece * count

    def __call__(self) -> Done:
        """Submit them all."""
        for i, (device, host, nbytes) in enumerate(self._pieces):
            to, source = (device, host) if self._kind == 1 else (host, device)
            stream = self._streams[i % len(self._streams)]
            if code := self._copy(to, source, nbytes, self._kind, stream.cuda_stream):
                raise RuntimeError(f"cudaMemcpyAsync: {code}")
        for other in self._streams[1:]:
            self._streams[0].wait_stream(other)
        done = torch.cuda.Event()
        done.record(self._streams[0])
        stop, pause_s = self._pause
        if pause_s:
            done.synchronize()
            stop.wait(pause_s)
        return done


def plain_copies(step: DecodeStep, memory: Tensor, pinned: Tensor) -> list[dict[str, Any]]:
    """What the hardware alone costs a step: one copy, pieces, streams, priorities, pauses, other memory."""
    combined = ctypes.c_void_p()
    cudart = ctypes.CDLL("libcudart.so.13")
    if code := cudart.cudaHostAlloc(ctypes.byref(combined), ctypes.c_size_t(BYTES), ctypes.c_uint(_WRITE_COMBINED)):
        raise RuntimeError(f"cudaHostAlloc: {code}")
    assert combined.value is not None
    pieces = {"piece": 2 << 20, "count": 128}
    forms: dict[str, dict[str, Any]] = {
        "one of 256 MiB": {},
        "pieces of 2 MiB": pieces,
        "pieces of 2 MiB, two streams": {**pieces, "streams": 2},
        "pieces of 64 KiB": {"piece": 64 << 10, "count": 512},
        "lowest priority": {"priority": 0},
        "always to or from the same 8 MiB of the device": {**pieces, "device_bytes": 8 << 20},
        "16 MiB, then 0.1 ms of pause": {"piece": 16 << 20, "pause_s": 1e-4},
        "4 MiB, then 0.1 ms of pause": {"piece": 4 << 20, "pause_s": 1e-4},
        "write-combined host memory": {},
    }
    results = []
    for direction, (form, options) in itertools.product(DIRECTIONS, forms.items()):
        host = combined.value if form.startswith("write-combined") else pinned.data_ptr()
        copies = _Plain(direction, memory.data_ptr(), host, **options)
        ahead = 1 if "pause_s" in options else 3
        results.append(step.beside(f"plain copy {direction}, {form}", copies, copies.nbytes, ahead))
    torch.cuda.synchronize()
    cudart.cudaFreeHost(combined)
    return results
