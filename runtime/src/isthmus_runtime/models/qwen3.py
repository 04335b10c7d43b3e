"""Qwen3 (dense): Qwen2's layers without biases, with a norm of every query and key head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..layers.rope_spec import RopeSpec
from .base import ModelSpec, Shapes, TensorSource
from .config_reader import ConfigReader
from .gguf_format import GgufFormat
from .shapes import decoder_shapes
from .shard import WHOLE, Shard

if TYPE_CHECKING:
    import torch

    from .decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Spec(ModelSpec):
    """Pre-norm decoder with grouped-query attention over normed heads and a gated SiLU MLP."""

    sharded: ClassVar[bool] = True

    rope: RopeSpec
    attention_bias: bool
    """Biases of all four projections of the attention."""

    def tensor_shapes(self) -> Shapes:
        return decoder_shapes(self, qkv_bias=self.attention_bias, output_bias=self.attention_bias, qk_norm=True)

    def build(self, source: TensorSource, dtype: torch.dtype, shard: Shard = WHOLE) -> Decoder:
        from .decoder import Decoder, Parts

        parts = Parts(self, source, dtype, shard)
        return Decoder(parts, [parts.layer(number) for number in range(self.num_layers)], ropes=[self.rope])


def parse(read: ConfigReader) -> Qwen3Spec:
    """The record of a Qwen3's `config.json`."""
    # Its heads are sized apart from hidden_size.
    common = read.common(head_dim=128, max_position=32768)
    read.only("hidden_act", "silu")
    spec = Qwen3Spec(
        **common,
        windows=read.qwen_windows(common["num_layers"]),
        rope=read.rope(),
        attention_bias=read.boolean("attention_bias", False),
    )
    read.finish()
    return spec


GGUF = GgufFormat(architecture="qwen3", config=lambda header: {"hidden_act": "silu"})
