"""A checkpoint on its way to a device: read by several threads into staging, copied from there while they read on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from ..checkpoints.safetensors import Checkpoint
from ..models.base import TensorSource
from ..models.shard import Slice
from .device.base import Device, Event

_THREADS = 4
_PIECE = 16 << 20
"""Bytes: large enough that a read and a copy run at full speed, small enough that they overlap within a tensor."""


@contextmanager
def on_device(checkpoint: Checkpoint, device: Device) -> Iterator[TensorSource]:
    """The checkpoint's tensors in the device's memory. Host memory is read into directly."""
    if device.torch_device.type == "cpu":
        yield checkpoint
        return
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="weights") as readers:
        yield StagedWeights(checkpoint, device, readers)


class StagedWeights:
    """`models.base.TensorSource` over a checkpoint, through a ring of staging buffers."""

    def __init__(
        self, checkpoint: Checkpoint, device: Device, readers: ThreadPoolExecutor, piece: int = _PIECE
    ) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._readers = readers
        self._piece = piece
        # As many again as are being read may be on their way to the device.
        self._free = deque(device.staging(piece, dtype=torch.uint8) for _ in range(2 * _THREADS))
        self._copying: deque[tuple[Event, Tensor]] = deque()

    def take(self, *parts: str | Slice) -> Tensor:
        """The tensors, or slices, joined by their rows. fp16, in which nothing is computed, becomes fp32."""
        checkpoint = self._checkpoint
        if len({checkpoint.dtype(part) for part in parts}) > 1:
            return torch.cat([self.take(part).float() for part in parts])
        shapes = [checkpoint.shape(part) for part in parts]
        joined = torch.empty(
            (sum(shape[0] for shape in shapes), *shapes[0][1:]),
            dtype=checkpoint.dtype(parts[0]),
            device=self._device.torch_device,
        )
        target = joined.view(-1).view(torch.uint8)
        reading: deque[tuple[Future[None], Tensor, Tensor]] = deque()
        at = 0
        for part, shape in zip(parts, shapes, strict=True):
            size = prod(shape) * joined.itemsize
            for offset in range(0, size, self._piece):
                count = min(self._piece, size - offset)
                if len(reading) == _THREADS:
                    self._send(*reading.popleft())
                buffer = self._buffer()
                view = memoryview(buffer[:count].numpy().data)
                future = self._readers.submit(checkpoint.read_into, part, offset, view)
                reading.append((future, buffer, target[at : at + count]))
                at += count
        while reading:
            self._send(*reading.popleft())
        return joined.float() if joined.dtype == torch.float16 else joined

    def _buffer(self) -> Tensor:
        """A buffer that nothing is read into or copied from."""
        if not self._free:
            event, buffer = self._copying.popleft()
            event.wait()
            return buffer
        return self._free.popleft()

    def _send(self, read: Future[None], buffer: Tensor, target: Tensor) -> None:
        read.result()
        self._device.enqueue(lambda: self._device.copy(target, buffer[: len(target)]))
        self._copying.append((self._device.record(), buffer))
