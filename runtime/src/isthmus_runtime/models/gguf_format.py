"""How llama.cpp's GGUF files name and store a family's tensors and settings. Torch-free."""

from __future__ import annotations

import re
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
        "self_attn.qkv_proj": "attn_qkv",
        "mlp.gate": "ffn_gate_inp",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
)
"""Parts of a layer of Llama's kind, ours -> theirs."""

_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")


def _unread(name: str) -> list[float]:
    raise AssertionError(f"{name}: asked for before the tensors are open")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What a file says of itself."""

    source: str
    """The file, for errors."""
    metadata: Mapping[str, Any]
    tensors: frozenset[str]
    numbers: Callable[[str], list[float]] = _unread
    """The values of a small fp32 tensor."""

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
    own_rope: `config` says how the rotary embedding is stretched, and which part of a head turns.
    extra_tensors: names outside the layers of tensors that `config` reads.
    config: keys of `config.json` beside those that all families have in common.
    restore: undoes what llama.cpp's converter did to tensor `name` (ours).
    """

    architecture: str
    layer_names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    own_rope: bool = False
    extra_tensors: tuple[str, ...] = ()
    config: Callable[[GgufHeader], dict[str, Any]]
    restore: Callable[[ModelSpec, str, Tensor], Tensor] = _as_it_is

    def place(self, name: str) -> tuple[str, int | None]:
        """The GGUF name of our tensor `name`, and which of its first dimension, where experts are stacked."""
        stem, _, kind = name.rpartition(".")
        if stem.startswith("model.layers."):
            number, _, part = stem.removeprefix("model.layers.").partition(".")
            expert = _EXPERT.fullmatch(part)
            if expert is not None:
                return f"blk.{number}.ffn_{expert[2]}_exps.{kind}", int(expert[1])
            return f"blk.{number}.{self.layer_names[part]}.{kind}", None
        return f"{MODEL_NAMES[stem]}.{kind}", None
