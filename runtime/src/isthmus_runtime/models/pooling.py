"""What a model is served for, and how its states become an embedding. Torch-free.

Embedding models come as sentence-transformers saves them: `modules.json` lists a transformer, how its states are pooled
and whether the vector is normalised; `1_Pooling/config.json` says which states count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..request import GENERATES, ServedTask
from .json_reader import read_json

_MODULES = "modules.json"
POOLING_THERE = "1_Pooling/config.json"
POOLING_HERE = "1_Pooling.json"
"""Where it is in a source, and in a folder that was downloaded, which has no folders."""


class PoolingKind(StrEnum):
    """Which of a prompt's states make its vector."""

    LAST = "last"
    MEAN = "mean"
    FIRST = "first"


_KINDS: Mapping[str, PoolingKind] = {
    "pooling_mode_lasttoken": PoolingKind.LAST,
    "pooling_mode_mean_tokens": PoolingKind.MEAN,
    "pooling_mode_cls_token": PoolingKind.FIRST,
}


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a prompt's states, after the final norm, become one vector."""

    kind: PoolingKind = PoolingKind.LAST
    normalize: bool = True
    """To length 1, after it was cut."""

    @property
    def needs_every_state(self) -> bool:
        """Whether a prefix hit, which leaves states uncomputed, would change the vector."""
        return self.kind is not PoolingKind.LAST


@dataclass(frozen=True, slots=True)
class Served:
    """What a model directory is served for."""

    task: ServedTask = GENERATES
    pooling: Pooling | None = None
    """Of an embedding model."""


def read_task(directory: str | Path, asked: str = "auto") -> Served:
    """What the model in `directory` is served for where `--task` says `asked`: `auto` embeds with a model that says how
    its states are pooled, and generates with any other.

    Raises ConfigError for a module that is not supported, and for an embedding model that is to do something else.
    """
    folder = Path(directory)
    pooled = (folder / _MODULES).is_file()
    if asked == "generate" or (asked == "auto" and not pooled):
        return Served()
    if asked == "score":
        return Served(ServedTask(kind="score"))
    pooling = _read_pooling(folder) if pooled else Pooling()
    return Served(_embeds(read_json(folder / "config.json"), folder, pooling), pooling)


def _read_pooling(folder: Path) -> Pooling:
    problems: list[str] = []
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in _modules(folder)]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        problems.append(
            f"{folder / _MODULES}: modules {', '.join(kinds) or 'none'} are not supported; known: Transformer, "
            "Pooling, and Normalize after them"
        )
    path = next((path for name in (POOLING_THERE, POOLING_HERE) if (path := folder / name).is_file()), None)
    path = path or folder / POOLING_THERE
    values = read_json(path) if path.is_file() else {}
    on = [name for name, value in values.items() if name.startswith("pooling_mode_") and value]
    if not path.is_file():
        problems.append(f"{path} is missing: it says which states make a vector; copy it from the model's source")
    elif len(on) != 1 or on[0] not in _KINDS:
        problems.append(f"{path}: {', '.join(on) or 'no mode'} is not supported; known: one of {', '.join(_KINDS)}")
    if values.get("include_prompt", True) is not True:
        problems.append(f"{path}: include_prompt false is not supported: all tokens count here")
    if problems:
        raise ConfigError(problems)
    return Pooling(_KINDS[on[0]], kinds[-1] == "Normalize")


def _modules(folder: Path) -> list[dict[str, Any]]:
    path = folder / _MODULES
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} cannot be read as JSON: {e}") from e
    if not isinstance(value, list) or not all(isinstance(module, dict) for module in value):
        raise ConfigError(f"{path} must hold a list of objects, a module each")
    return value


def _embeds(config: Mapping[str, Any], folder: Path, pooling: Pooling) -> ServedTask:
    """Embeddings may be cut where config.json says so; of Qwen3's embedding models, which do not say, all may."""
    size, lengths = config.get("hidden_size"), config.get("matryoshka_dimensions") or []
    if type(size) is not int or size < 1:
        raise ConfigError(f"{folder / 'config.json'}: hidden_size is {size!r}, expected a whole number of at least 1")
    if not isinstance(lengths, list) or not all(type(n) is int and 1 <= n <= size for n in lengths):
        raise ConfigError(
            f"{folder / 'config.json'}: matryoshka_dimensions is {lengths!r}, expected numbers from 1 to {size}"
        )
    qwen3 = str(config.get("model_type")) == "qwen3" and pooling.kind is PoolingKind.LAST
    shorter = bool(config.get("is_matryoshka", bool(lengths) or qwen3))
    return ServedTask(kind="embed", dimensions=size, shorter=shorter, lengths=tuple(sorted(lengths)))
