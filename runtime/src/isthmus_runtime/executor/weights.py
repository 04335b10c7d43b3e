"""Where weights come from on their way to a device."""

from __future__ import annotations

from torch import Tensor

from ..models.base import TensorSource
from .device.base import Device


class OnDevice:
    """The tensors of another source, in the device's memory."""

    def __init__(self, source: TensorSource, device: Device) -> None:
        self._source = source
        self._device = device.torch_device

    def take(self, *names: str) -> Tensor:
        """As the source's, on the device."""
        return self._source.take(*names).to(self._device)
