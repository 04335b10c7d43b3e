"""Reads a low-rank adapter in PEFT's format (adapter_config.json, adapter_model.safetensors), all of it checked.

An adapter that is almost right answers almost right: what is set and not implemented is refused by name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ..errors import WeightsError
from ..models.base import Shapes

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"^base_model\.model\.(.+)\.lora_(A|B)(?:\.default)?\.weight$")
MAX_LISTED = 8
_MAX_CONFIG_BYTES = 1 << 20
_HEADER_BYTES = 64 << 10
_HEADER_OF_MODULE = 1024
"""A header has at most so many bytes, and more for each module: two matrices of names that are twice as long as usual.
The library takes 100 MiB, in time that grows with the square of the names, and keeps the interpreter to itself: half a
second for 20,000 of them, minutes for what a file could hold."""
_MOST_TEXT = 200
"""Of each problem: names and values are the file's own."""

_REFUSED = {
    "use_dora": "weight-decomposed adapters (DoRA)",
    "modules_to_save": "whole modules beside the adapter",
    "trainable_token_indices": "trained tokens of the embedding",
    "target_parameters": "adapters of single parameters, such as experts'",
    "layer_replication": "replicated layers",
    "lora_bias": "biases of the adapter",
    "fan_in_fan_out": "weights stored the other way round",
    "use_qalora": "grouped inputs (QA-LoRA)",
    "alora_invocation_tokens": "activation by tokens (aLoRA)",
    "arrow_config": "routing between adapters (Arrow)",
    "use_bdlora": "block-diagonal adapters",
    "velora_config": "projected gradients",
}
_BOOKKEEPING = frozenset((
    "peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "peft_version", "r", "lora_alpha", "use_rslora", "lora_dropout", "target_modules", "exclude_modules", "bias",
    "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "megatron_config",
    "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config",
    "qalora_group_size", "ensure_weight_tying", "monteclora_config",
))  # fmt: skip
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal")
"""Ways of starting the training that leave the model's own weights alone."""


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The two matrices of one module: it computes ``W x + scale B A x``."""

    a: Tensor
    """[r, in]."""
    b: Tensor
    """[out, r]."""
    scale: float


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter as it was read."""

    digest: str
    """SHA-256 over both files, 32 hex digits."""
    modules: Mapping[str, LoraPair]
    """By the name of the module in the model's checkpoint."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The files of an adapter, as they were at one time."""

    folder: Path
    """Where they are from."""
    config: bytes
    weights: bytes


def read_files(folder: str | Path, shapes: Shapes, adaptable: Collection[str], max_rank: int) -> AdapterFiles:
    """Read the adapter in `folder`, unless it is larger than one that fits. Raises WeightsError. Arguments as of
    `parse_adapter`."""
    folder = Path(folder)
    text = _bytes(folder / CONFIG, _MAX_CONFIG_BYTES)
    widest = sum(8 * max_rank * sum(shapes[f"{module}.weight"]) for module in adaptable)
    if not (folder / WEIGHTS).exists() and (folder / "adapter_model.bin").exists():
        raise WeightsError(f"{folder} holds only adapter_model.bin, a pickle, which is not loaded; save {WEIGHTS}")
    found = AdapterFiles(folder, text, _bytes(folder / WEIGHTS, widest + _header_bytes(adaptable)))
    if _bytes(folder / CONFIG, _MAX_CONFIG_BYTES) != text:
        raise WeightsError(f"{folder} was changed while it was read; load it again when it is complete")
    return found


def parse_adapter(files: AdapterFiles, shapes: Shapes, adaptable: Collection[str], max_rank: int) -> LoraAdapter:
    """Check that an adapter fits.

    Args:
        shapes: every tensor of the model, `ModelSpec.tensor_shapes`.
        adaptable: names of the modules that can have adapters.
        max_rank: most rows that a matrix A may have.

    Raises:
        WeightsError: with all that is wrong, and where.
    """
    path, raw = files.folder / WEIGHTS, files.weights
    config = _config(files.folder / CONFIG, files.config)
    header, most = int.from_bytes(raw[:8], "little"), _header_bytes(adaptable)
    if header > most:
        raise WeightsError(f"{path} says that its header has {header} bytes; that of an adapter has at most {most}")
    try:
        tensors = load(raw)
    except KeyError as e:
        raise WeightsError(f"{path} holds a tensor of type {e}, which no adapter has") from e
    except (SafetensorError, ValueError) as e:
        raise WeightsError(f"{path} is not a complete safetensors file ({len(raw)} bytes): {e}") from e
    digest = sha256(sha256(files.config).digest() + sha256(raw).digest()).hexdigest()[:32]
    return LoraAdapter(digest, _modules(path, config, tensors, shapes, adaptable, max_rank))


def _bytes(path: Path, most: int) -> bytes:
    try:
        # Opening a pipe would wait for whoever writes into it.
        if path.exists() and not path.is_file():
            raise WeightsError(f"{path} is no regular file")
        with path.open("rb") as file:
            before = os.fstat(file.fileno())
            found = file.read(most + 1)
            after = os.fstat(file.fileno())
        now = path.stat()
    except FileNotFoundError:
        raise WeightsError(f"{path} is missing; an adapter's folder holds {CONFIG} and {WEIGHTS}") from None
    except OSError as e:
        raise WeightsError(f"{path} cannot be read: {e.strerror}") from e
    states = {(state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns) for state in (before, after, now)}
    if len(states) > 1:
        raise WeightsError(f"{path} was changed while it was read; load it again when it is complete")
    if len(found) > most:
        raise WeightsError(f"{path} has more than the {most} bytes that an adapter of --max-lora-rank can have")
    return found


def _config(path: Path, text: bytes) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise WeightsError(f"{path} cannot be read as JSON: {e}") from e
    if not isinstance(config, dict):
        raise WeightsError(f"{path} holds {type(config).__name__}, expected a JSON object")
    problems: list[str] = []
    if config.get("peft_type") != "LORA":
        problems.append(f"peft_type is {config.get('peft_type')!r}; only LORA is implemented")
    for key, value in config.items():
        if value and key in _REFUSED:
            problems.append(f"{key} is set: {_REFUSED[key]} are not implemented")
        elif value and key not in _BOOKKEEPING and key not in _REFUSED:
            problems.append(f"{key!r} is {value!r}, and its meaning is not known here")
    if config.get("bias", "none") != "none":
        problems.append(f"bias is {config['bias']!r}: trained biases are not implemented; train with bias none")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start not in _PLAIN_STARTS:
        problems.append(
            f"init_lora_weights is {start!r}, which changes the model's own weights; convert it to a plain adapter "
            "(PEFT: save_pretrained with path_initial_model_for_weight_conversion)"
        )
    if not _positive(config.get("lora_alpha", 8)):
        problems.append(f"lora_alpha is {config['lora_alpha']!r}, expected a number above 0")
    pattern = config.get("alpha_pattern") or {}
    if not isinstance(pattern, dict) or not all(
        re.fullmatch(r"[\w.]+", k) and _positive(v) for k, v in pattern.items()
    ):
        problems.append("alpha_pattern must map names of modules, not regular expressions, to numbers above 0")
    if problems:
        raise _error(path, problems)
    return config


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6


def _modules(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    shapes: Shapes,
    adaptable: Collection[str],
    max_rank: int,
) -> dict[str, LoraPair]:
    pairs: dict[str, dict[str, Tensor]] = {}
    problems: list[str] = []
    for name, tensor in tensors.items():
        match = _TENSOR.match(name)
        if match is None:
            problems.append(f"tensor {name} is no matrix A or B of a linear layer; only those are implemented")
        elif match[2] in (pair := pairs.setdefault(match[1], {})):
            problems.append(f"matrix {match[2]} of {match[1]} is there twice, with and without .default; keep one")
        else:
            pair[match[2]] = tensor
    found: dict[str, LoraPair] = {}
    for module, pair in sorted(pairs.items()):
        wrong = _problem(module, pair, shapes, adaptable, max_rank)
        if wrong:
            problems.append(wrong)
            continue
        rank = pair["A"].shape[0]
        found[module] = LoraPair(pair["A"], pair["B"], _alpha(config, module) / (rank**0.5 if _rs(config) else rank))
    if not pairs and not problems:
        problems.append("holds no matrices of an adapter")
    if problems:
        raise _error(path, problems)
    return found


def _error(path: Path, problems: Sequence[str]) -> WeightsError:
    hidden = len(problems) - MAX_LISTED
    told = [text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} ..." for text in problems[:MAX_LISTED]]
    return WeightsError([f"{path}: {text}" for text in (*told, *([f"... and {hidden} more"] if hidden > 0 else []))])


def _header_bytes(adaptable: Collection[str]) -> int:
    return _HEADER_BYTES + _HEADER_OF_MODULE * len(adaptable)


def _rs(config: Mapping[str, Any]) -> bool:
    """Rank-stabilised (Kalajdzievski 2023, arXiv:2312.03732): divided by the root of the rank."""
    return bool(config.get("use_rslora"))


def _alpha(config: Mapping[str, Any], module: str) -> float:
    """A pattern names the end of a module's name, whole parts of it."""
    patterns: dict[str, float] = config.get("alpha_pattern") or {}
    for end, alpha in patterns.items():
        if f".{module}".endswith(f".{end}"):
            return alpha
    return float(config.get("lora_alpha", 8))


def _problem(module: str, pair: Mapping[str, Tensor], shapes: Shapes, adaptable: Collection[str], max_rank: int) -> str:
    weight = shapes.get(f"{module}.weight")
    if weight is None:
        return f"{module} is not a module of this model"
    if module not in adaptable:
        return f"adapters of {module} are not implemented for this model; train without it"
    if set(pair) != {"A", "B"}:
        return f"{module} has only its matrix {next(iter(pair))}"
    a, b = pair["A"], pair["B"]
    if not (a.is_floating_point() and b.is_floating_point()) or min(a.element_size(), b.element_size()) < 2:
        return f"{module} is of {a.dtype} and {b.dtype}; expected float32, float16 or bfloat16"
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or (b.shape[0], a.shape[1]) != weight:
        return (
            f"{module} has A {list(a.shape)} and B {list(b.shape)}, but the model's weight is {list(weight)}: "
            "the adapter is of another model"
        )
    if not 1 <= a.shape[0] <= max_rank:
        return f"{module} has rank {a.shape[0]}, and --max-lora-rank is {max_rank}; raise it"
    return ""
