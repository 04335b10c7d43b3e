"""What a model is: `config.json` and `generation_config.json` read into one frozen record. Torch-free.

Only keys that are known here are read; a value that would change the mathematics and is not supported is refused by
name, with every other problem of the file, in one WeightsError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import WeightsError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding: base frequency, and how it is stretched to longer contexts.

    kind: `default`; `linear` (positions divided by `factor`); `llama3` (low frequencies divided by `factor`, high ones
    kept, in between interpolated: the Llama 3.1 release).
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position: int
    """Longest sequence the model was made for, tokens."""
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    """Bias of the attention's output projection."""
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm of each query and key head before the rotation (Qwen3)."""
    windows: tuple[int | None, ...]
    """Per layer: sliding window in tokens, the current one included, or None for the whole prefix."""
    dtype: str
    """The dtype the checkpoint says it has (`float32`, `bfloat16`, `float16`), or empty."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def read_model_spec(directory: str | Path) -> ModelSpec:
    """Read a Hugging Face model directory's configuration. WeightsError lists everything that is wrong with it."""
    folder = Path(directory)
    if not folder.is_dir():
        raise WeightsError(f"model directory {str(folder)!r} does not exist; import or fetch a model first")
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    return parse_model_spec(
        config, read_json(generation) if generation.exists() else {}, source=str(folder / "config.json")
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a WeightsError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(f"{path} is missing; a model directory holds config.json and *.safetensors") from None
    except (OSError, ValueError) as e:
        raise WeightsError(f"{path} cannot be read as JSON: {e}") from e
    if not isinstance(value, dict):
        raise WeightsError(f"{path} holds {type(value).__name__}, expected a JSON object")
    return value


class _Reader:
    """Takes typed values out of a JSON object, collecting every problem."""

    def __init__(self, values: Mapping[str, Any], source: str, problems: list[str]) -> None:
        self._values = values
        self._source = source
        self.problems = problems

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def problem(self, key: str, text: str) -> None:
        self.problems.append(f"{self._source}: {key} {text}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.problem(key, f"is {value!r}, expected a whole number of at least 1")
            return 1
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            self.problem(key, f"is {value!r}, expected a number above 0")
            return 1.0
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problem(key, f"is {value!r}, expected true or false")
            return default
        return value

    def text(self, key: str, default: str) -> str:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            self.problem(key, f"is {value!r}, expected a text")
            return default
        return value


def parse_model_spec(config: Mapping[str, Any], generation: Mapping[str, Any], *, source: str) -> ModelSpec:
    """The record for a parsed `config.json`; `source` names the file in errors."""
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and len(names) == 1 else names
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise WeightsError(f"{source}: architecture {architecture!r} is not supported; known: {known}")
    assert isinstance(architecture, str)
    problems: list[str] = []
    read = _Reader(config, source, problems)
    qwen = architecture.startswith("Qwen")
    num_layers = read.integer("num_hidden_layers")
    hidden = read.integer("hidden_size")
    heads = read.integer("num_attention_heads")
    kv_heads = read.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        read.problem("num_attention_heads", f"{heads} is not a multiple of num_key_value_heads {kv_heads}")
    # Qwen3 sizes its heads apart from hidden_size; the others fall back to an even split.
    head_dim = read.integer("head_dim", 128 if architecture == "Qwen3ForCausalLM" else max(1, hidden // heads))
    if head_dim % 2:
        read.problem("head_dim", f"{head_dim} is odd; rotary embedding needs an even one")
    if read.text("hidden_act", "silu") != "silu":
        read.problem("hidden_act", f"{config['hidden_act']!r} is not supported; known: silu")
    if config.get("quantization_config"):
        read.problem("quantization_config", "is set; quantised checkpoints are not supported, use a bf16 or fp32 one")
    if config.get("partial_rotary_factor") not in (None, 1, 1.0):
        read.problem("partial_rotary_factor", f"{config['partial_rotary_factor']!r} is not supported; known: 1")
    # Mistral's attention has no biases, whatever its file says; Qwen2's are fixed in its code.
    attention_bias = architecture != "MistralForCausalLM" and read.boolean("attention_bias", False)
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        rope=_rope(config, read, source, problems),
        max_position=read.integer("max_position_embeddings", 2048),
        tie_word_embeddings=read.boolean("tie_word_embeddings", False),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        output_bias=attention_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=architecture == "LlamaForCausalLM" and read.boolean("mlp_bias", False),
        qk_norm=architecture == "Qwen3ForCausalLM",
        windows=_windows(read, num_layers, qwen, architecture),
        dtype=read.text("dtype", "") or read.text("torch_dtype", ""),
        bos_token_id=next(iter(_token_ids(config.get("bos_token_id"), read, "bos_token_id")), None),
        eos_token_ids=_token_ids(generation.get("eos_token_id", config.get("eos_token_id")), read, "eos_token_id"),
    )
    if problems:
        raise WeightsError(problems)
    return spec


def _token_ids(value: Any, read: _Reader, key: str) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        read.problem(key, f"is {value!r}, expected a token id or a list of them")
        return (0,)
    return tuple(ids)


def _rope(config: Mapping[str, Any], read: _Reader, source: str, problems: list[str]) -> RopeSpec:
    # transformers 5 writes everything under rope_parameters, version 4 theta beside rope_scaling.
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        read.problem("rope_scaling", f"is {scaling!r}, expected an object")
        scaling = {}
    inner = _Reader(scaling, f"{source}: rope_scaling", problems)
    kind = inner.text("rope_type", "") or inner.text("type", "default")
    theta = inner.number("rope_theta", read.number("rope_theta", 10000.0))
    if kind not in ROPE_KINDS:
        inner.problem("rope_type", f"{kind!r} is not supported; known: {', '.join(ROPE_KINDS)}")
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=inner.number("factor"))
    if kind == "llama3":
        return RopeSpec(
            theta=theta,
            kind=kind,
            factor=inner.number("factor"),
            low_freq_factor=inner.number("low_freq_factor"),
            high_freq_factor=inner.number("high_freq_factor"),
            original_max_position=inner.integer("original_max_position_embeddings"),
        )
    return RopeSpec(theta=theta)


def _windows(read: _Reader, num_layers: int, qwen: bool, architecture: str) -> tuple[int | None, ...]:
    if architecture == "LlamaForCausalLM" or read.get("sliding_window") is None:
        return (None,) * num_layers
    window = read.integer("sliding_window")
    if not qwen:
        return (window,) * num_layers
    if not read.boolean("use_sliding_window", False):
        return (None,) * num_layers
    kinds = read.get("layer_types")
    if kinds is None:
        first = read.get("max_window_layers")
        first = first if isinstance(first, int) else 28
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not set(kinds) <= {"sliding_attention", "full_attention"}
    ):
        read.problem(
            "layer_types", f"must name sliding_attention or full_attention for each of the {num_layers} layers"
        )
        return (None,) * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
