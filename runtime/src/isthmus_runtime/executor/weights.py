"""Reads a Hugging Face safetensors directory, everything checked before anything is used."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import WeightsError
from ..models.config import read_json

_LOG = logging.getLogger(__name__)
_INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")
# Derived from config.json, and stored by old exporters all the same.
_DERIVED = "rotary_emb.inv_freq"
_MAX_LISTED = 8


class Checkpoint:
    """The tensors of a model directory, memory-mapped. A context manager: files are closed on leaving it."""

    def __init__(self, directory: str | Path, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Open `directory` and check that it holds `expected` (name to shape), readable and nothing else.

        Raises WeightsError with every problem: file, tensor, expected and found.
        """
        self._folder = Path(directory)
        self._stack = ExitStack()
        self._where: dict[str, tuple[Path, Any]] = {}
        try:
            self._open()
            self._check(expected)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._where.clear()
        self._stack.close()

    def take(self, name: str) -> Tensor:
        """The tensor, backed by the mapped file."""
        path, file = self._where[name]
        try:
            tensor: Tensor = file.get_tensor(name)
        except SafetensorError as e:
            raise WeightsError(f"{path}: tensor {name} cannot be read: {e}") from e
        # A half-precision number is exact in fp32; no computation here is done in fp16.
        return tensor.float() if tensor.dtype == torch.float16 else tensor

    def _open(self) -> None:
        files = self._files()
        problems: list[str] = []
        for path in files:
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except FileNotFoundError:
                problems.append(f"{path} is missing")
                continue
            except (SafetensorError, OSError) as e:
                problems.append(f"{path} is not a complete safetensors file ({path.stat().st_size} bytes): {e}")
                continue
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if name in self._where:
                    problems.append(f"{path}: tensor {name} is also in {self._where[name][0].name}")
                self._where[name] = (path, file)
        if problems:
            raise WeightsError(problems)

    def _files(self) -> list[Path]:
        index = self._folder / _INDEX
        if index.exists():
            names = read_json(index).get("weight_map")
            if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
                raise WeightsError(f"{index}: weight_map must map tensor names to file names")
            outside = sorted({name for name in names.values() if Path(name).name != name})
            if outside:
                raise WeightsError(f"{index}: {outside[0]!r} is not a plain file name in {self._folder}")
            return [self._folder / name for name in sorted(set(names.values()))]
        files = sorted(self._folder.glob("*.safetensors"))
        if len(files) > 1:
            raise WeightsError(f"{self._folder} holds {len(files)} safetensors files but no {_INDEX} that joins them")
        if not files:
            pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in self._folder.glob(pattern))
            held = f"only {pickles[0]}, which is a pickle and is not loaded" if pickles else "no weights"
            raise WeightsError(f"{self._folder} holds {held}; expected *.safetensors (convert the model, or `model import` a GGUF)")
        return files

    def _check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        problems: list[str] = []
        for name, shape in expected.items():
            if name not in self._where:
                problems.append(f"{self._folder}: tensor {name} {list(shape)} is missing")
                continue
            path, file = self._where[name]
            part = file.get_slice(name)
            found, dtype = tuple(part.get_shape()), str(part.get_dtype())
            if found != shape:
                problems.append(f"{path}: tensor {name} has shape {list(found)}, config.json asks for {list(shape)}")
            if dtype not in _DTYPES:
                problems.append(f"{path}: tensor {name} has dtype {dtype}; supported: {', '.join(_DTYPES)}")
        for name in sorted(self._where.keys() - expected.keys()):
            if name.endswith(_DERIVED):
                continue
            if name == "lm_head.weight":
                # Tied embeddings that were saved twice.
                _LOG.debug("%s: lm_head.weight is ignored, the embedding is tied", self._folder)
                continue
            problems.append(f"{self._where[name][0]}: tensor {name} is not part of the architecture in config.json")
        if problems:
            hidden = len(problems) - _MAX_LISTED
            raise WeightsError([*problems[:_MAX_LISTED], *([f"... and {hidden} more"] if hidden > 0 else [])])
