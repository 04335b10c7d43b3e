"""Quantised checkpoints: which tensors stand for a weight, and how they become one.

Weights are expanded as they are loaded, in fp32, and rounded to bf16, as those of a GGUF file are: whatever the engine
computes in, prefill and decode hold the same numbers. The arithmetic is the one of unquantised weights; what is lost is
the smaller size. Where the device multiplies 8-bit floats, those with a scale a row are kept (`fp8`), and so are 4-bit
floats where it multiplies these (`mxfp4`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..models.base import Shapes, TensorSource
from ..models.quantization import Quantization
from ..models.shard import Slice

PLAIN = ("F32", "F16", "BF16")
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
# The values of a 4-bit float (1 sign, 2 exponent, 1 mantissa bits; OCP Microscaling 1.0), by its bits.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_FP4_GROUP = 32
# Where AWQ puts the eight 4-bit numbers of an int32, lowest bits first.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Take = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a checkpoint must hold it."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = PLAIN
    """Any of these, in safetensors' names."""


class Scheme(ABC):
    """One way of storing weights."""

    ignored: tuple[str, ...] = ()
    """Ends of the names of tensors that are not weights."""

    def __init__(self, settings: Quantization) -> None:
        self.settings = settings

    @abstractmethod
    def parts(self, name: str, shape: tuple[int, ...], found: Shapes) -> dict[str, Stored] | None:
        """What stands for the weight `name` in a checkpoint of tensors `found`; None: the weight itself."""

    @abstractmethod
    def expand(self, name: str, shape: tuple[int, ...], parts: Mapping[str, Stored], take: Take) -> Tensor:
        """The weight, in fp32 or bf16."""

    def as_fp8(
        self, name: str, shape: tuple[int, ...], parts: Mapping[str, Stored], take: Take
    ) -> tuple[Tensor, Tensor] | None:
        """The weight as E4M3 and fp32 scales of its rows, where it is stored so; None: expand it."""
        del name, shape, parts, take
        return None

    def as_mxfp4(self, parts: Mapping[str, Stored], take: Take) -> tuple[Tensor, Tensor] | None:
        """The numbers and scales of a weight that is stored as 4-bit floats; None: it is not."""
        del parts, take
        return None


class Fp8(Scheme):
    """8-bit floats times one scale for the tensor, for each row, or for each block."""

    ignored = (".input_scale", ".k_scale", ".v_scale")

    def parts(self, name: str, shape: tuple[int, ...], found: Shapes) -> dict[str, Stored] | None:
        scale = next((f"{name}{end}" for end in ("_scale_inv", "_scale") if f"{name}{end}" in found), None)
        if scale is None or len(shape) != 2:
            return None
        rows, columns = shape
        allowed: list[tuple[int, ...]] = [(), (1,), (rows,), (rows, 1)]
        if self.settings.block is not None:
            allowed = [(-(-rows // self.settings.block[0]), -(-columns // self.settings.block[1]))]
        held = found[scale] if found[scale] in allowed else allowed[-1]
        return {name: Stored(shape, _FLOAT8), scale: Stored(held)}

    def expand(self, name: str, shape: tuple[int, ...], parts: Mapping[str, Stored], take: Take) -> Tensor:
        weight, scale = (take(part).float() for part in parts)
        if self.settings.block is not None:
            for axis, size in enumerate(self.settings.block):
                scale = scale.repeat_interleave(size, dim=axis).narrow(axis, 0, shape[axis])
        elif scale.dim() == 1 and len(scale) > 1:
            scale = scale[:, None]
        return weight * scale

    def as_fp8(
        self, name: str, shape: tuple[int, ...], parts: Mapping[str, Stored], take: Take
    ) -> tuple[Tensor, Tensor] | None:
        if self.settings.block is not None:
            return None
        weight, scale = (take(part) for part in parts)
        if weight.dtype != torch.float8_e4m3fn:
            return None
        return weight, scale.float().reshape(-1).expand(shape[0]).contiguous()


class Grouped(Scheme):
    """Whole numbers of a few bits, packed into int32, less a zero and times a scale for each group of inputs."""

    def parts(self, name: str, shape: tuple[int, ...], found: Shapes) -> dict[str, Stored] | None:
        stem = name.removesuffix(".weight")
        if f"{stem}.qweight" not in found or len(shape) != 2:
            return None
        rows, columns = shape
        groups, each = -(-columns // (self.settings.group_size or columns)), 32 // self.settings.bits
        packed = (columns, rows // each) if self.settings.method == "awq" else (columns // each, rows)
        parts = {
            f"{stem}.qweight": Stored(packed, ("I32",)),
            f"{stem}.qzeros": Stored((groups, rows // each), ("I32",)),
            f"{stem}.scales": Stored((groups, rows)),
        }
        if f"{stem}.g_idx" in found:
            parts[f"{stem}.g_idx"] = Stored((columns,), ("I32",))
        return parts

    def expand(self, name: str, shape: tuple[int, ...], parts: Mapping[str, Stored], take: Take) -> Tensor:
        packed, zeros, scales, *rest = (take(part) for part in parts)
        awq = self.settings.method == "awq"
        # [inputs, outputs], as both formats have it.
        numbers = self._unpack(packed) if awq else self._unpack(packed.T).T
        columns = numbers.shape[0]
        size = self.settings.group_size or columns
        group = rest[0].long() if rest else torch.arange(columns, device=packed.device) // size
        zero = self._unpack(zeros) + self.settings.zero_offset
        return ((numbers - zero[group]).float() * scales.float()[group]).T

    def _unpack(self, packed: Tensor) -> Tensor:
        """int32 [N, M] to int32 [N, M * 32 / bits]."""
        bits = self.settings.bits
        at = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
        numbers = (packed[..., None] >> at) & ((1 << bits) - 1)
        if self.settings.method == "awq":
            order = torch.tensor(_AWQ_ORDER, device=packed.device)
            numbers = torch.empty_like(numbers).index_copy_(-1, order, numbers)
        return numbers.flatten(-2)


class Mxfp4(Scheme):
    """4-bit floats in blocks of 32 along the inputs, each block times a power of two: GPT-OSS's experts."""

    def parts(self, name: str, shape: tuple[int, ...], found: Shapes) -> dict[str, Stored] | None:
        if f"{name}_blocks" not in found or len(shape) != 3:
            return None
        experts, inputs, outputs = shape
        blocks = (experts, outputs, inputs // _FP4_GROUP)
        return {
            f"{name}_blocks": Stored((*blocks, _FP4_GROUP // 2), ("U8",)),
            f"{name}_scales": Stored(blocks, ("U8",)),
        }

    def expand(self, name: str, shape: tuple[int, ...], parts: Mapping[str, Stored], take: Take) -> Tensor:
        blocks, scales = (take(part) for part in parts)
        # Both fit bf16 as they are: one bit of mantissa, and a power of two.
        values = torch.tensor(_FP4, dtype=torch.bfloat16, device=blocks.device)
        pairs = torch.stack([values[(blocks & 15).int()], values[(blocks >> 4).int()]], dim=-1).flatten(-2)
        powers = torch.exp2(scales.float() - 127).bfloat16()
        return (pairs * powers[..., None]).flatten(2).transpose(1, 2)

    def as_mxfp4(self, parts: Mapping[str, Stored], take: Take) -> tuple[Tensor, Tensor] | None:
        blocks, scales = (take(part) for part in parts)
        return blocks, scales


_SCHEMES: Mapping[str, type[Scheme]] = {"fp8": Fp8, "awq": Grouped, "gptq": Grouped, "mxfp4": Mxfp4}


def scheme_of(settings: Quantization | None) -> Scheme | None:
    """How weights are stored that a configuration says are quantised."""
    return None if settings is None else _SCHEMES[settings.method](settings)


class Expanded:
    """`models.base.TensorSource` over a source of what is stored."""

    def __init__(
        self, source: TensorSource, scheme: Scheme, shapes: Shapes, parts: Mapping[str, Mapping[str, Stored]]
    ) -> None:
        """`parts`: of the quantised weights among `shapes`."""
        self._source, self._scheme, self._shapes, self._parts = source, scheme, shapes, parts

    def take(self, *parts: str | Slice) -> Tensor:
        """The weights, or slices of them, joined along their first dimension. A weight is expanded whole, then cut."""
        if not any((part.name if isinstance(part, Slice) else part) in self._parts for part in parts):
            return self._source.take(*parts)
        weights = [part.cut(self._one(part.name)) if isinstance(part, Slice) else self._one(part) for part in parts]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    def _one(self, name: str) -> Tensor:
        parts, shape = self._parts.get(name), self._shapes[name]
        if parts is None:
            return self._source.take(name)
        weight = self._scheme.expand(name, shape, parts, self._source.take)
        assert weight.shape == shape, (name, weight.shape, shape)
        return weight.to(torch.bfloat16).contiguous()

    def as_fp8(self, part: str | Slice) -> tuple[Tensor, Tensor] | None:
        """A weight, or a slice of it, as E4M3 and fp32 scales of its rows, where it is stored so."""
        name = part.name if isinstance(part, Slice) else part
        parts = self._parts.get(name)
        found = None if parts is None else self._scheme.as_fp8(name, self._shapes[name], parts, self._source.take)
        if found is None or not isinstance(part, Slice):
            return found
        weight, scale = found
        # By bytes: few operations know 8-bit floats.
        own = part.cut(weight.view(torch.uint8)).view(weight.dtype)
        return own, part.cut(scale) if part.dim == 0 else scale

    def as_mxfp4(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Numbers uint8 [E, N, G, 16] and scales uint8 [E, N, G] of a weight that is stored as 4-bit floats."""
        parts = self._parts.get(name)
        return None if parts is None else self._scheme.as_mxfp4(parts, self._source.take)

    def cost(self, sizes: Callable[[str], int]) -> str:
        """What expanding costs, in words; `sizes` are the bytes of a stored tensor."""
        stored = sum(sizes(part) for parts in self._parts.values() for part in parts)
        expanded = sum(2 * prod(self._shapes[name]) for name in self._parts)
        times = expanded / max(1, stored)
        return (
            f"{self._scheme.settings.method} weights are expanded to bfloat16 at load: {stored / 1e6:.1f} MB in the "
            f"files take {expanded / 1e6:.1f} MB, and every step that reads them reads {times:.1f} times the bytes"
        )
