"""Reads a Hugging Face safetensors directory, everything checked before anything is used."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import WeightsError
from ..models.base import Shapes
from ..models.json_reader import read_json
from ..models.shard import Slice
from .names import INDEX
from .quantized import Scheme, Stored

_LOG = logging.getLogger(__name__)
_DTYPES = MappingProxyType(
    {
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        # Of quantised weights.
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "I32": torch.int32,
        "U8": torch.uint8,
    }
)
# Derived from config.json, and stored by old exporters all the same.
_DERIVED = "rotary_emb.inv_freq"
_MAX_LISTED = 8
MAX_HEADER_BYTES = 16 << 20
"""Of each file. That of 100,000 tensors, all experts of the largest models in one file, has about 12 MB."""
_BODY = "model."
_HEAD = "lm_head."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """Where a tensor is."""

    path: Path
    file: FileIO
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Byte offset in the file."""


def _parts(scheme: Scheme, expected: Shapes, found: Shapes) -> dict[str, dict[str, Stored]]:
    parts = {name: scheme.parts(name, shape, found) for name, shape in expected.items()}
    return {name: held for name, held in parts.items() if held is not None}


class Checkpoint:
    """The tensors of a model directory. A context manager: files are closed on leaving it."""

    def __init__(
        self,
        directory: str | Path,
        expected: Shapes,
        *,
        scheme: Scheme | None = None,
        unused: tuple[str, ...] = (),
    ) -> None:
        """Open `directory` and check that it holds `expected` (name to shape), readable and nothing else.

        Quantised weights may stand in the stead of weights as `scheme` says. Tensors whose names begin with one of
        `unused` may be there, too.

        Raises WeightsError with every problem: file, tensor, expected and found.
        """
        self._folder = Path(directory)
        self._stack = ExitStack()
        self._entries: dict[str, _Entry] = {}
        try:
            self._open()
            self._name_as(expected)
            found = {name: entry.shape for name, entry in self._entries.items()}
            self.parts = {} if scheme is None else _parts(scheme, expected, found)
            """Of each quantised weight, what stands for it."""
            stored = {name: Stored(shape) for name, shape in expected.items() if name not in self.parts}
            for parts in self.parts.values():
                stored |= parts
            self._check(stored, unused, scheme.ignored if scheme is not None else ())
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def take(self, *parts: str | Slice) -> Tensor:
        """The tensors, or slices of them, joined along their first dimension, in memory of their own.

        Bytes are read, not mapped: they land where they are wanted, and a file that shrinks meanwhile is an error and
        not a signal. The dtype is the checkpoint's, except that fp16, in which nothing is computed, becomes fp32.
        """
        if len({self.dtype(part) for part in parts}) > 1:
            return torch.cat([self.take(part).float() for part in parts])
        shapes = [self.shape(part) for part in parts]
        rows = sum(shape[0] for shape in shapes)
        joined = torch.empty((rows, *shapes[0][1:]), dtype=self.dtype(parts[0]))
        target = memoryview(joined.view(torch.uint8).numpy().reshape(-1).data)
        at = 0
        for part, shape in zip(parts, shapes, strict=True):
            end = at + shape[0] * joined[0].nbytes
            self.read_into(part, 0, target[at:end])
            at = end
        return joined.float() if joined.dtype == torch.float16 else joined

    def shape(self, part: str | Slice) -> tuple[int, ...]:
        """The shape as it is stored; a single number counts as a vector of one."""
        if isinstance(part, Slice):
            return part.shape(self.shape(part.name))
        return self._entries[part].shape or (1,)

    def nbytes(self, name: str) -> int:
        """Bytes as it is stored."""
        return prod(self.shape(name)) * self.dtype(name).itemsize

    def dtype(self, part: str | Slice) -> torch.dtype:
        """The dtype as it is stored."""
        return _DTYPES[self._entries[part.name if isinstance(part, Slice) else part].dtype]

    def read_into(self, part: str | Slice, offset: int, target: memoryview) -> None:
        """Fill `target` with the tensor's, or the slice's, bytes from `offset` on. Any number of threads may read at
        once."""
        if not isinstance(part, Slice):
            self._read(part, offset, target)
            return
        first, run, step = part.row_bytes(self.shape(part.name), self.dtype(part).itemsize)
        at = 0
        while at < len(target):
            number, within = divmod(offset + at, run)
            end = min(len(target), at + run - within)
            self._read(part.name, first + number * step + within, target[at:end])
            at = end

    def _read(self, name: str, offset: int, target: memoryview) -> None:
        entry = self._entries[name]
        at = 0
        while at < len(target):
            count = os.preadv(entry.file.fileno(), [target[at:]], entry.start + offset + at)
            if not count:
                raise WeightsError(
                    f"{entry.path}: tensor {name} ends {len(target) - at} bytes early; the file was changed"
                )
            at += count

    def _open(self) -> None:
        problems: list[str] = []
        for path in self._files():
            try:
                with path.open("rb") as opened:
                    declared = int.from_bytes(opened.read(8), "little")
                if declared > MAX_HEADER_BYTES:
                    # The library takes 100 MB of it, and lets nothing else run meanwhile.
                    problems.append(
                        f"{path} says that its header has {declared} bytes; that of a model has at most "
                        f"{MAX_HEADER_BYTES}"
                    )
                    continue
                # The library checks the header against the file: sizes, gaps and overlaps.
                with safe_open(path, framework="pt"):
                    pass
                file = self._stack.enter_context(FileIO(path))
            except FileNotFoundError:
                problems.append(f"{path} is missing")
                continue
            except (SafetensorError, OSError) as e:
                problems.append(f"{path} is not a complete safetensors file ({path.stat().st_size} bytes): {e}")
                continue
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                if name in self._entries:
                    problems.append(f"{path}: tensor {name} is also in {self._entries[name].path.name}")
                self._entries[name] = _Entry(
                    path=path,
                    file=file,
                    dtype=entry["dtype"],
                    shape=tuple(entry["shape"]),
                    start=8 + length + entry["data_offsets"][0],
                )
        if problems:
            raise WeightsError(problems)

    def _name_as(self, expected: Shapes) -> None:
        """A decoder saved without its head (transformers' AutoModel, as embedding models are) has names that do not
        begin with `model.`: give them the names they have within the whole model."""
        if any(name.startswith(_BODY) for name in expected) and not any(
            name.startswith((_BODY, _HEAD)) for name in self._entries
        ):
            self._entries = {_BODY + name: entry for name, entry in self._entries.items()}

    def _files(self) -> list[Path]:
        index = self._folder / INDEX
        if index.exists():
            names = read_json(index).get("weight_map")
            if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
                raise WeightsError(f"{index}: weight_map must map tensor names to file names")
            outside = sorted({name for name in names.values() if Path(name).name != name})
            if outside:
                raise WeightsError(f"{index}: {outside[0]!r} is not a plain file name in {self._folder}")
            others = sorted({name for name in names.values() if not name.endswith(".safetensors")})
            if others:
                raise WeightsError(f"{index}: {others[0]!r} is not called *.safetensors, as files of weights are")
            return [self._folder / name for name in sorted(set(names.values()))]
        files = sorted(self._folder.glob("*.safetensors"))
        if len(files) > 1:
            raise WeightsError(
                f"{self._folder} holds {len(files)} safetensors files but no {INDEX} that says which file holds what"
            )
        if not files:
            pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in self._folder.glob(pattern))
            held = f"only {pickles[0]}, which is a pickle and is not loaded" if pickles else "no weights"
            raise WeightsError(
                f"{self._folder} holds {held}; expected *.safetensors (`model import` makes them of a GGUF)"
            )
        return files

    def _check(self, expected: Mapping[str, Stored], unused: tuple[str, ...], ignored: tuple[str, ...]) -> None:
        problems: list[str] = []
        for name, stored in expected.items():
            entry, shape = self._entries.get(name), stored.shape
            if entry is None:
                problems.append(f"{self._folder}: tensor {name} {list(shape)} is missing")
                continue
            if entry.shape != shape:
                problems.append(
                    f"{entry.path}: tensor {name} has shape {list(entry.shape)}, config.json asks for {list(shape)}"
                )
            if entry.dtype not in stored.dtypes:
                known = ", ".join(stored.dtypes)
                problems.append(f"{entry.path}: tensor {name} has dtype {entry.dtype}; supported: {known}")
        for name in sorted(self._entries.keys() - expected.keys()):
            if name.endswith((_DERIVED, *ignored)) or name.startswith(unused):
                continue
            if name == "lm_head.weight":
                # Tied embeddings that were saved twice.
                _LOG.debug("%s: lm_head.weight is ignored, the embedding is tied", self._folder)
                continue
            problems.append(f"{self._entries[name].path}: tensor {name} is not part of the architecture in config.json")
        if problems:
            hidden = len(problems) - _MAX_LISTED
            raise WeightsError([*problems[:_MAX_LISTED], *([f"... and {hidden} more"] if hidden > 0 else [])])
