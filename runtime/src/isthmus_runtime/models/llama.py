"""Llama 1 to 3.x, and what copies it (SmolLM2, ...)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..layers.rope_spec import RopeSpec
from .base import ModelSpec, Shapes, TensorSource
from .config_reader import ConfigReader
from .shapes import decoder_shapes

if TYPE_CHECKING:
    import torch

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
