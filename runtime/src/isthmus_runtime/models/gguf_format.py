"""How llama.cpp's GGUF files name and store a family's tensors and settings. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import WeightsError
from .base import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

MODEL_NAMES: Mapping[str, str] = MappingProxyType(
    {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
)
"""Tensors outside the layers, ours -> theirs."""

LAYER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
)
"""Parts of a layer of Llama's kind, ours -> theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What a file says of itself."""

    source: str
    """The file, for errors."""
    metadata: Mapping[str, Any]
    tensors: frozenset[str]

    def value(self, key: str, default: Any = None) -> Any:
        """Metadata `key` below the file's architecture; WeightsError when it is missing and has no default."""
        name = f"{self.metadata['general.architecture']}.{key}"
        found = self.metadata.get(name, default)
        if found is None:
            raise WeightsError(f"{self.source}: metadata {name} is missing")
        return found


def _as_it_is(spec: ModelSpec, name: str, weight: Tensor) -> Tensor:
    del spec, name
    return weight


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFormat:
    """A family's own: `GGUF` in its module.

    architecture: `general.architecture` of the files.
    layer_names: parts of a layer, ours -> theirs.
    config: keys of `config.json` beside those that all families have in common.
    restore: undoes what llama.cpp's converter did to tensor `name` (ours).
    """

    architecture: str
    layer_names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    config: Callable[[GgufHeader], dict[str, Any]]
    restore: Callable[[ModelSpec, str, Tensor], Tensor] = _as_it_is

    def tensor_name(self, name: str) -> str:
        """The GGUF name of our tensor `name`."""
        stem, _, kind = name.rpartition(".")
        if stem.startswith("model.layers."):
            number, _, part = stem.removeprefix("model.layers.").partition(".")
            return f"blk.{number}.{self.layer_names[part]}.{kind}"
        return f"{MODEL_NAMES[stem]}.{kind}"
