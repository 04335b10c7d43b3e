"""Low-rank adapters of the torch executor: those that are known in the host's memory, those in slots on the device.

The slots are made once and stay where they are, so that a captured step finds what was put into them since. An adapter
is laid out as its slot when it is read: taking it there is a copy for each matrix, in the order of the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoints.peft import MAX_LISTED, LoraAdapter, read_adapter
from ..errors import WeightsError
from ..interfaces.steps import Adapter, AdapterSlot
from ..layers.lora import Adaptable, Adapters
from ..lora_config import LoraConfig
from ..models.base import Model
from .device.base import Device


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """`interfaces.steps.Adapter`, as the slots hold it."""

    digest: str
    matrices: tuple[tuple[Tensor, Tensor], ...]
    """Of each adaptable layer [P, R, in] and [R, out]; ranks that the adapter does not have are 0."""

    @property
    def nbytes(self) -> int:
        """As much as one slot has."""
        return sum(a.nbytes + b.nbytes for a, b in self.matrices)


class AdapterSlots:
    """`interfaces.steps.AdapterHolder`, and the slots on the device."""

    def __init__(self, model: Model, device: Device, config: LoraConfig) -> None:
        """Give every adaptable layer of `model` its slots."""
        self._model = model
        self._device = device
        self._max_rank = config.max_rank
        self._layers: Sequence[Adaptable] = model.adaptable
        self._names = frozenset(module for layer in self._layers for module in layer.modules)
        self._known: dict[str, HostAdapter] = {}
        for layer in self._layers:
            outputs, inputs = layer.linear.shape
            a = device.zeros(config.max_loras, len(layer.modules), config.max_rank, inputs, dtype=model.dtype)
            b = device.zeros(config.max_loras, config.max_rank, outputs, dtype=model.dtype)
            layer.linear.adapters = Adapters(a, b, layer.starts)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(slots.a.nbytes + slots.b.nbytes for _, slots in self._slots())

    def read(self, folder: str) -> Adapter:
        """Read, check and lay out the adapter in `folder`. Any thread. Raises WeightsError."""
        found = read_adapter(folder, self._model.spec.tensor_shapes(), self._names, self._max_rank)
        problems: list[str] = []
        with torch.inference_mode():
            laid_out = tuple(self._laid_out(layer, slots, found, problems) for layer, slots in self._slots())
        if problems:
            raise WeightsError([f"{folder}: {problem}" for problem in problems[:MAX_LISTED]])
        return HostAdapter(found.digest, laid_out)

    def keep(self, adapter: Adapter) -> None:
        """Steps may name it from now on."""
        assert isinstance(adapter, HostAdapter)
        self._known[adapter.digest] = adapter

    def drop(self, digest: str) -> None:
        """Forget it; what is in slots stays there."""
        self._known.pop(digest, None)

    def kept(self) -> Mapping[str, int]:
        """Of `AdapterHolder`."""
        return {digest: adapter.nbytes for digest, adapter in self._known.copy().items()}

    def load(self, wanted: AdapterSlot) -> None:
        """Within a body: put an adapter into its slot."""
        for (_, slots), (a, b) in zip(self._slots(), self._known[wanted.digest].matrices, strict=True):
            self._device.copy(slots.a[wanted.slot - 1], a)
            self._device.copy(slots.b[wanted.slot - 1], b)

    def _slots(self) -> list[tuple[Adaptable, Adapters]]:
        return [(layer, layer.linear.adapters) for layer in self._layers if layer.linear.adapters is not None]

    def _laid_out(
        self, layer: Adaptable, slots: Adapters, found: LoraAdapter, problems: list[str]
    ) -> tuple[Tensor, Tensor]:
        a = self._device.host(*slots.a.shape[1:], dtype=slots.a.dtype)
        b = self._device.host(*slots.b.shape[1:], dtype=slots.b.dtype)
        stops = (*slots.starts[1:], b.shape[1])
        for part, (module, start, stop) in enumerate(zip(layer.modules, slots.starts, stops, strict=True)):
            pair = found.modules.get(module)
            if pair is not None:
                rank = len(pair.a)
                a[part, :rank] = pair.a.to(a.dtype)
                b[:rank, start:stop] = (pair.b.float() * pair.scale).T.to(b.dtype)
                # On a GPU, rows of other adapters in the same tile are multiplied with these and 0: NaN would spread.
                if not (a[part].isfinite().all() and b[:, start:stop].isfinite().all()):
                    problems.append(
                        f"{module} has NaN or infinity in A, or in B times its scale {pair.scale:g}, as {a.dtype}; "
                        "save it whole and with finite numbers"
                    )
        return a, b
