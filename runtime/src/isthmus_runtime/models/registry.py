"""Which module knows which architecture. Torch-free; a family's module is imported when a model of it is read."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from ..errors import WeightsError
from .base import ModelSpec
from .config_reader import ConfigReader
from .gguf_format import GgufFormat
from .json_reader import read_json

FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": "deepseek",
        "DeepseekV3ForCausalLM": "deepseek",
        "Gemma2ForCausalLM": "gemma2",
        "Gemma3ForCausalLM": "gemma3",
        "GptOssForCausalLM": "gpt_oss",
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "mistral",
        "Phi3ForCausalLM": "phi3",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
        "Qwen3MoeForCausalLM": "qwen3_moe",
    }
)
"""Architecture, as `config.json` names it -> module of this package."""
_WITHOUT_HEAD: Mapping[str, str] = MappingProxyType(
    {"LlamaModel": "llama", "MistralModel": "mistral", "Qwen2Model": "qwen2", "Qwen3Model": "qwen3"}
)
"""The same where a decoder was saved without its head, as embedding models are."""


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


def parse_model_spec(config: Mapping[str, Any], generation: Mapping[str, Any], *, source: str) -> ModelSpec:
    """The record for a parsed `config.json`; `source` names the file in errors."""
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and len(names) == 1 else names
    if not isinstance(architecture, str) or architecture not in {**FAMILIES, **_WITHOUT_HEAD}:
        known = ", ".join((*FAMILIES, *_WITHOUT_HEAD))
        raise WeightsError(f"{source}: architecture {architecture!r} is not supported; known: {known}")
    spec = _family(architecture).parse(ConfigReader(config, source, generation=generation))
    assert isinstance(spec, ModelSpec), architecture
    return spec


def gguf_formats() -> dict[str, tuple[str, GgufFormat]]:
    """`general.architecture` of a GGUF file -> architecture as `config.json` names it, and how the family is stored."""
    formats: dict[str, tuple[str, GgufFormat]] = {}
    for architecture in FAMILIES:
        form: GgufFormat | None = getattr(_family(architecture), "GGUF", None)
        if form is not None:
            formats[form.architecture] = (architecture, form)
    return formats


def _family(architecture: str) -> ModuleType:
    module = FAMILIES.get(architecture) or _WITHOUT_HEAD[architecture]
    return import_module(f".{module}", __package__)
