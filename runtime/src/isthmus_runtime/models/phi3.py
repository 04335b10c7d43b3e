"""Phi-3, Phi-3.5-mini, Phi-4 and Phi-4-mini: Llama's layers with joined projections, stretched by longrope."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from ..layers.rope_spec import RopeSpec
from .base import ModelSpec, Shapes, TensorSource
from .config_reader import ConfigReader
from .gguf_format import LAYER_NAMES, GgufFormat, GgufHeader
from .shapes import decoder_shapes
from .shard import WHOLE, Shard

if TYPE_CHECKING:
    import torch

    from .decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Phi3Spec(ModelSpec):
    """Pre-norm decoder with grouped-query attention, all layers windowed or none, and a gated SiLU MLP."""

    sharded: ClassVar[bool] = True

    rope: RopeSpec

    def tensor_shapes(self) -> Shapes:
        return decoder_shapes(self, fused=True)

    def build(self, source: TensorSource, dtype: torch.dtype, shard: Shard = WHOLE) -> Decoder:
        from .decoder import Decoder, Parts

        parts = Parts(self, source, dtype, shard)
        return Decoder(parts, [parts.layer(number) for number in range(self.num_layers)], ropes=[self.rope])


def parse(read: ConfigReader) -> Phi3Spec:
    """The record of a Phi-3's `config.json`."""
    common = read.common(max_position=4096, eps=1e-5)
    read.only("hidden_act", "silu")
    window = read.optional_integer("sliding_window")
    if window is not None and window >= common["max_position"]:
        # Written so by releases that have none.
        window = None
    # Of the blocks' sparse kind, which no release has.
    read.only("full_attn_mod", 1)
    read.only("interpolate_factor", 1)
    spec = Phi3Spec(**common, windows=(window,) * common["num_layers"], rope=read.rope(partial=True))
    # auto_map names code that came before transformers knew the family; the length before stretching matters to
    # longrope alone.
    read.finish("auto_map", "original_max_position_embeddings")
    return spec


_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}


def _gguf_config(header: GgufHeader) -> dict[str, Any]:
    config: dict[str, Any] = {
        "hidden_act": "silu",
        "sliding_window": header.value("attention.sliding_window", 0) or None,
    }
    head_dim = header.value("embedding_length") // header.value("attention.head_count")
    config["partial_rotary_factor"] = header.value("rope.dimension_count", head_dim) / head_dim
    if header.tensors.isdisjoint(_FACTORS.values()):
        return config
    scaling: dict[str, Any] = {key: header.numbers(name) for key, name in _FACTORS.items()}
    original = header.value("rope.scaling.original_context_length")
    return {
        **config,
        "rope_scaling": {"type": "longrope", **scaling},
        "original_max_position_embeddings": original,
    }


GGUF = GgufFormat(
    architecture="phi3",
    layer_names=MappingProxyType({**LAYER_NAMES, "mlp.gate_up_proj": "ffn_up"}),
    own_rope=True,
    extra_tensors=tuple(_FACTORS.values()),
    config=_gguf_config,
)
