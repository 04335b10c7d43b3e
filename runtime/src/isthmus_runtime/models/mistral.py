"""Mistral: Llama's layers without biases, over a sliding window in its first release."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..layers.rope_spec import RopeSpec
from .base import ModelSpec, Shapes, TensorSource
from .config_reader import ConfigReader
from .shapes import decoder_shapes
from .shard import WHOLE, Shard

if TYPE_CHECKING:
    import torch

    from .decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class MistralSpec(ModelSpec):
    """Pre-norm decoder with grouped-query attention, all layers windowed or none, and a gated SiLU MLP."""

    sharded: ClassVar[bool] = True

    rope: RopeSpec

    def tensor_shapes(self) -> Shapes:
        return decoder_shapes(self)

    def build(self, source: TensorSource, dtype: torch.dtype, shard: Shard = WHOLE) -> Decoder:
        from .decoder import Decoder, Parts

        parts = Parts(self, source, dtype, shard)
        return Decoder(parts, [parts.layer(number) for number in range(self.num_layers)], ropes=[self.rope])


def parse(read: ConfigReader) -> MistralSpec:
    """The record of a Mistral's `config.json`."""
    common = read.common(max_position=131072)
    read.only("hidden_act", "silu")
    window = None if read.get("sliding_window") is None else read.integer("sliding_window")
    spec = MistralSpec(**common, windows=(window,) * common["num_layers"], rope=read.rope())
    # Its attention has no biases, whatever the file says.
    read.finish("attention_bias", "mlp_bias")
    return spec
