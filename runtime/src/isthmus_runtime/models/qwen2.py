"""Qwen2 and Qwen2.5: Llama's layers with biases on q, k and v; some layers may be windowed."""

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
class Qwen2Spec(ModelSpec):
    """Pre-norm decoder with grouped-query attention and a gated SiLU MLP."""

    sharded: ClassVar[bool] = True

    rope: RopeSpec

    def tensor_shapes(self) -> Shapes:
        return decoder_shapes(self, qkv_bias=True)

    def build(self, source: TensorSource, dtype: torch.dtype, shard: Shard = WHOLE) -> Decoder:
        from .decoder import Decoder, Parts

        parts = Parts(self, source, dtype, shard)
        return Decoder(parts, [parts.layer(number) for number in range(self.num_layers)], ropes=[self.rope])


def parse(read: ConfigReader) -> Qwen2Spec:
    """The record of a Qwen2's `config.json`."""
    common = read.common(max_position=32768)
    read.only("hidden_act", "silu")
    spec = Qwen2Spec(**common, windows=read.qwen_windows(common["num_layers"]), rope=read.rope())
    # The biases are fixed in its code.
    read.finish("attention_bias", "mlp_bias", "use_mrope")
    return spec


GGUF = GgufFormat(architecture="qwen2", config=lambda header: {"hidden_act": "silu"})
