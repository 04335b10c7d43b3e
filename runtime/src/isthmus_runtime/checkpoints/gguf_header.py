"""The header of a GGUF file, read with bounds, and where its tensors are.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Nothing is allocated
for a number that the file claims before its bytes are known to be there. `gguf.GGUFReader` believes such numbers, and
makes two numpy arrays of each text: 2.8 GB of a million.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import quant_shape_to_byte_shape

from ..errors import WeightsError

MAX_FIELDS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_ELEMENTS = 1 << 22
"""In all arrays together; a vocabulary of 262,144 with its scores, types and merges has 1.3 million."""
MAX_TEXTS = 1 << 20
"""Of them, texts, of which a tokenizer's files take a multiple: a vocabulary of 262,144 has twice as many merges."""
MAX_NAME_BYTES = 1 << 16
MAX_STRING_BYTES = 1 << 24
MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


_FLOATS: dict[gguf.GGMLQuantizationType, np.dtype[Any]] = {
    gguf.GGMLQuantizationType.F16: np.dtype(np.float16),
    gguf.GGMLQuantizationType.F32: np.dtype(np.float32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One tensor of a file. shape: outermost dimension first; at, nbytes: where in the file."""

    name: str
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    at: int
    nbytes: int

    def read(self, source: Path) -> npt.NDArray[Any]:
        """Its values, or the bytes of its blocks for what is neither fp16 nor fp32; of the file, not in memory."""
        dtype: np.dtype[Any] = _FLOATS.get(self.kind, np.dtype(np.uint8))
        shape = self.shape if self.kind in _FLOATS else quant_shape_to_byte_shape(self.shape, self.kind)
        return np.memmap(source, dtype, mode="r", offset=self.at, shape=shape)


@dataclass(frozen=True, slots=True)
class Scan:
    """What a header says. metadata: with None for arrays, unless they were asked for."""

    metadata: dict[str, object]
    tensors: dict[str, Stored]


class _Reader:
    """A cursor over the file that never leaves it."""

    def __init__(self, data: mmap.mmap, source: Path, arrays: bool) -> None:
        self._data = data
        self._source = source
        self._arrays = arrays
        self.at = 0
        self.left_elements = MAX_ELEMENTS
        self.left_texts = MAX_TEXTS

    def refuse(self, problem: str) -> WeightsError:
        return WeightsError(f"{self._source} is truncated or corrupt at byte {self.at}: {problem}")

    @property
    def left(self) -> int:
        return len(self._data) - self.at

    def number(self, form: str) -> int | float | bool:
        size = struct.calcsize(form)
        if self.left < size:
            raise self.refuse("the file ends inside its header")
        value: int | float | bool = struct.unpack_from(form, self._data, self.at)[0]
        self.at += size
        return value

    def count(self, what: str, limit: int) -> int:
        value = int(self.number("<Q"))
        if value > limit:
            self.at -= 8
            raise self.refuse(f"{what} is {value}, the limit is {limit}")
        return value

    def skip(self, nbytes: int, what: str) -> None:
        if nbytes > self.left:
            raise self.refuse(f"{what} of {nbytes} bytes, but {self.left} are left in the file")
        self.at += nbytes

    def text(self, what: str, limit: int) -> str:
        size = self.count(f"the length of {what}", limit)
        self.skip(size, what)
        return self._decoded(self.at - size, what)

    def _decoded(self, start: int, what: str) -> str:
        try:
            return self._data[start : self.at].decode()
        except UnicodeDecodeError as e:
            raise self.refuse(f"{what} is not UTF-8: {e}") from e

    def array(self, key: str) -> list[object] | None:
        """An array; None where they are only walked over."""
        kind = int(self.number("<I"))
        if kind == _ARRAY:
            raise self.refuse(f"{key} is an array of arrays, which no model needs")
        if kind != _STRING and kind not in _SCALARS:
            raise self.refuse(f"{key} is an array of unknown type {kind}")
        count = self.count(f"the number of elements of {key}", self.left_elements)
        self.left_elements -= count
        start = self.at
        if kind != _STRING:
            self.skip(count * struct.calcsize(_SCALARS[kind]), f"array {key}")
            return np.frombuffer(self._data[start : self.at], _SCALARS[kind]).tolist() if self._arrays else None
        if count > self.left_texts:
            raise self.refuse(f"{key} has {count} texts; at most {MAX_TEXTS} are allowed in all arrays")
        self.left_texts -= count
        if count * 8 > self.left:
            raise self.refuse(f"{key} has {count} texts, but {self.left} bytes are left in the file")
        texts: list[object] = []
        size_of, text_of = f"the length of a text of {key}", f"a text of {key}"
        for _ in range(count):
            size = self.count(size_of, MAX_STRING_BYTES)
            self.skip(size, text_of)
            if self._arrays:
                texts.append(self._decoded(self.at - size, text_of))
        return texts if self._arrays else None


def scan_header(source: Path, *, arrays: bool = False) -> Scan:
    """Walk through the header of `source`, and read `arrays`. WeightsError names the byte, the claim and the limit."""
    with source.open("rb") as file:
        magic = file.read(4)
        if magic != b"GGUF":
            raise WeightsError(f"{source} is not a GGUF file: it starts with {magic!r}, expected b'GGUF'")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _scan(_Reader(data, source, arrays))


def _scan(reader: _Reader) -> Scan:
    reader.at = 4
    version = reader.number("<I")
    if version not in (2, 3):
        raise reader.refuse(f"GGUF version {version}; supported: 2 and 3, little-endian")
    tensors = reader.count("the number of tensors", MAX_TENSORS)
    fields = reader.count("the number of metadata fields", MAX_FIELDS)
    metadata: dict[str, object] = {}
    for _ in range(fields):
        key = reader.text("a metadata key", MAX_NAME_BYTES)
        if key in metadata:
            raise reader.refuse(f"metadata key {key!r} is there twice")
        kind = int(reader.number("<I"))
        if kind == _ARRAY:
            metadata[key] = reader.array(key)
        elif kind == _STRING:
            metadata[key] = reader.text(key, MAX_STRING_BYTES)
        elif kind in _SCALARS:
            metadata[key] = reader.number(_SCALARS[kind])
        else:
            raise reader.refuse(f"metadata {key} has unknown type {kind}")
    places = [_tensor(reader) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise reader.refuse(f"general.alignment {alignment!r}; expected a power of 2 up to 1 MiB")
    reader.at += -reader.at % alignment
    for one in places:
        if one.at + one.nbytes > reader.left:
            raise reader.refuse(
                f"tensor {one.name} ends {one.at + one.nbytes} bytes on, but {max(0, reader.left)} are left"
            )
    stored = {one.name: replace(one, at=reader.at + one.at) for one in places}
    if len(stored) != len(places):
        raise reader.refuse("a tensor is there twice")
    return Scan(metadata, stored)


def _tensor(reader: _Reader) -> Stored:
    """A tensor, its place counted from where the header ends."""
    name = reader.text("a tensor's name", MAX_NAME_BYTES)
    dimensions = int(reader.number("<I"))
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise reader.refuse(f"tensor {name} has {dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
    # GGUF lists the innermost dimension first.
    shape = tuple(reversed([int(reader.number("<Q")) for _ in range(dimensions)]))
    kind = int(reader.number("<I"))
    try:
        form = gguf.GGMLQuantizationType(kind)
        block, size = gguf.GGML_QUANT_SIZES[form]
    except (ValueError, KeyError) as e:
        raise reader.refuse(f"tensor {name} has unknown type {kind}") from e
    elements = math.prod(shape)
    if not elements or shape[-1] % block:
        raise reader.refuse(f"tensor {name}, {form.name}, has shape {list(shape)}; rows hold {block} or a multiple")
    return Stored(name=name, kind=form, shape=shape, at=int(reader.number("<Q")), nbytes=elements // block * size)
