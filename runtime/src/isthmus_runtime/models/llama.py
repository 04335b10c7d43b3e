"""Llama 1 to 3.x, and what copies it (SmolLM2, ...)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..layers.rope_spec import RopeSpec
from .base import ModelSpec, Shapes, TensorSource
from .config_reader import ConfigReader
from .gguf_format import GgufFormat, GgufHeader
from .shapes import decoder_shapes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSpec(ModelSpec):
    """Pre-norm decoder with grouped-query attention over the whole prefix and a gated SiLU MLP."""

    rope: RopeSpec
    attention_bias: bool
    """Biases of all four projections of the attention."""
    mlp_bias: bool

    def tensor_shapes(self) -> Shapes:
        return decoder_shapes(
            self, qkv_bias=self.attention_bias, output_bias=self.attention_bias, mlp_bias=self.mlp_bias
        )

    def build(self, source: TensorSource, dtype: torch.dtype) -> Decoder:
        from .decoder import Decoder, Parts

        parts = Parts(self, source, dtype)
        return Decoder(parts, [parts.layer(number) for number in range(self.num_layers)], ropes=[self.rope])


def parse(read: ConfigReader) -> LlamaSpec:
    """The record of a Llama's `config.json`."""
    common = read.common()
    read.only("hidden_act", "silu")
    spec = LlamaSpec(
        **common,
        windows=(None,) * common["num_layers"],
        rope=read.rope(),
        attention_bias=read.boolean("attention_bias", False),
        mlp_bias=read.boolean("mlp_bias", False),
    )
    read.finish("is_llama_config")
    return spec


def _gguf_config(header: GgufHeader) -> dict[str, Any]:
    return {"hidden_act": "silu", "attention_bias": "blk.0.attn_q.bias" in header.tensors}


def _unpermute(spec: ModelSpec, name: str, weight: Tensor) -> Tensor:
    """llama.cpp stores q and k rows so that rotated pairs are neighbours; ours are half a head apart."""
    part = name.split(".")[-2]
    if part not in ("q_proj", "k_proj"):
        return weight
    heads, rows = spec.num_heads if part == "q_proj" else spec.num_kv_heads, weight.shape[0]
    pairs = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


GGUF = GgufFormat(architecture="llama", config=_gguf_config, restore=_unpermute)
