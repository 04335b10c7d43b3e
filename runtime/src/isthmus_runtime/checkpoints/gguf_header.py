"""The header of a GGUF file, read with bounds: what `gguf.GGUFReader` believes without asking is checked here first.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Nothing is allocated
for a number that the file claims before its bytes are known to be there, so a header costs at most its own size.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import gguf

from ..errors import WeightsError

MAX_FIELDS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_ELEMENTS = 1 << 22
"""In all arrays together; a vocabulary of 262,144 with its scores, types and merges has 1.3 million."""
MAX_TEXTS = 1 << 20
"""Of them, texts, of which the reader takes 3 KB each: a vocabulary of 262,144 has twice as many merges."""
MAX_NAME_BYTES = 1 << 16
MAX_STRING_BYTES = 1 << 24
MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True, slots=True)
class Scan:
    """What a header says, its arrays left out."""

    metadata: dict[str, object]
    tensors: frozenset[str]


class _Reader:
    """A cursor over the file that never leaves it."""

    def __init__(self, data: mmap.mmap, source: Path) -> None:
        self._data = data
        self._source = source
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
        start = self.at
        self.skip(size, what)
        try:
            return self._data[start : self.at].decode()
        except UnicodeDecodeError as e:
            raise self.refuse(f"{what} is not UTF-8: {e}") from e

    def array(self, key: str) -> None:
        """Walk over an array."""
        kind = int(self.number("<I"))
        if kind == _ARRAY:
            raise self.refuse(f"{key} is an array of arrays, which no model needs")
        if kind != _STRING and kind not in _SCALARS:
            raise self.refuse(f"{key} is an array of unknown type {kind}")
        count = self.count(f"the number of elements of {key}", self.left_elements)
        self.left_elements -= count
        if kind != _STRING:
            self.skip(count * struct.calcsize(_SCALARS[kind]), f"array {key}")
            return
        if count > self.left_texts:
            raise self.refuse(f"{key} has {count} texts; at most {MAX_TEXTS} are allowed in all arrays")
        self.left_texts -= count
        if count * 8 > self.left:
            raise self.refuse(f"{key} has {count} texts, but {self.left} bytes are left in the file")
        for _ in range(count):
            self.skip(self.count(f"the length of a text of {key}", MAX_STRING_BYTES), f"a text of {key}")


def scan_header(source: Path) -> Scan:
    """Walk through the header of `source`. Raises WeightsError naming the byte, the claim and the limit."""
    with source.open("rb") as file:
        magic = file.read(4)
        if magic != b"GGUF":
            raise WeightsError(f"{source} is not a GGUF file: it starts with {magic!r}, expected b'GGUF'")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _scan(_Reader(data, source))


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
            reader.array(key)
            metadata[key] = None
        elif kind == _STRING:
            metadata[key] = reader.text(key, MAX_STRING_BYTES)
        elif kind in _SCALARS:
            metadata[key] = reader.number(_SCALARS[kind])
        else:
            raise reader.refuse(f"metadata {key} has unknown type {kind}")
    places = [_tensor(reader) for _ in range(tensors)]
    names = frozenset(name for name, _, _ in places)
    if len(names) != len(places):
        raise reader.refuse("a tensor is there twice")
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise reader.refuse(f"general.alignment {alignment!r}; expected a power of 2 up to 1 MiB")
    reader.at += -reader.at % alignment
    for name, offset, nbytes in places:
        if offset + nbytes > reader.left:
            raise reader.refuse(f"tensor {name} ends {offset + nbytes} bytes on, but {max(0, reader.left)} are left")
    return Scan(metadata, names)


def _tensor(reader: _Reader) -> tuple[str, int, int]:
    """Name, offset and bytes."""
    name = reader.text("a tensor's name", MAX_NAME_BYTES)
    dimensions = int(reader.number("<I"))
    if dimensions > MAX_DIMENSIONS:
        raise reader.refuse(f"tensor {name} has {dimensions} dimensions, the limit is {MAX_DIMENSIONS}")
    elements = 1
    for _ in range(dimensions):
        elements *= int(reader.number("<Q"))
    kind = int(reader.number("<I"))
    try:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    except (ValueError, KeyError) as e:
        raise reader.refuse(f"tensor {name} has unknown type {kind}") from e
    return name, int(reader.number("<Q")), -(-elements // block) * size
