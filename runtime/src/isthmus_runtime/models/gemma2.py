"""Gemma 2: every other layer windowed, and soft caps on the scores of attention and on the logits."""

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
    from torch import Tensor

    from .decoder import Decoder, DecoderLayer, Parts

_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_LAYERS_27B = 46
"""Layers of the release whose attention is scaled by hidden size over heads instead of by the head size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma2Spec(ModelSpec):
    """Norms before and after both branches, a gated GELU MLP, embeddings times sqrt(hidden size)."""

    sharded: ClassVar[bool] = True

    rope: RopeSpec
    query_pre_attn_scalar: float
    """Its inverse root is the factor on q·k."""
    attention_bias: bool
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None

    def tensor_shapes(self) -> Shapes:
        bias = self.attention_bias
        return decoder_shapes(self, qkv_bias=bias, output_bias=bias, norms=_NORMS)

    def build(self, source: TensorSource, dtype: torch.dtype, shard: Shard = WHOLE) -> Decoder:
        from .decoder import Decoder, Parts

        # Checkpoints store a norm's weight as its difference from 1.
        parts = Parts(self, source, dtype, shard, norm_offset=1.0)
        return Decoder(
            parts,
            [self._layer(parts, number) for number in range(self.num_layers)],
            ropes=[self.rope],
            embedding_scale=self.hidden_size**0.5,
            softcap=self.final_logit_softcapping,
        )

    def _layer(self, parts: Parts, number: int) -> DecoderLayer:
        from .decoder import DecoderLayer

        at = f"model.layers.{number}"
        before_attention, after_attention, before_mlp, after_mlp = (parts.norm(f"{at}.{name}") for name in _NORMS)
        return DecoderLayer(
            attention_norm=before_attention,
            attention=parts.attention(
                f"{at}.self_attn",
                window=self.windows[number],
                scale=self.query_pre_attn_scalar**-0.5,
                softcap=self.attn_logit_softcapping,
            ),
            after_attention=after_attention,
            mlp_norm=before_mlp,
            mlp=parts.mlp(f"{at}.mlp", "gelu_tanh"),
            after_mlp=after_mlp,
        )


def parse(read: ConfigReader) -> Gemma2Spec:
    """The record of a Gemma 2's `config.json`."""
    common = read.common(head_dim=256, max_position=8192, tied=True)
    read.only("hidden_activation", "gelu_pytorch_tanh")
    read.only("use_bidirectional_attention", False)
    layers, window = common["num_layers"], read.integer("sliding_window", 4096)
    local = read.layer_types(layers) or tuple(number % 2 == 0 for number in range(layers))
    spec = Gemma2Spec(
        **common,
        windows=tuple(window if is_local else None for is_local in local),
        rope=read.rope(),
        query_pre_attn_scalar=read.number("query_pre_attn_scalar", 256.0),
        attention_bias=read.boolean("attention_bias", False),
        attn_logit_softcapping=read.optional_number("attn_logit_softcapping", 50.0),
        final_logit_softcapping=read.optional_number("final_logit_softcapping", 30.0),
    )
    # Its activation is hidden_activation's.
    read.finish("hidden_act", "cache_implementation")
    return spec


def _gguf_config(header: GgufHeader) -> dict[str, Any]:
    heads, hidden, layers = (header.value(key) for key in ("attention.head_count", "embedding_length", "block_count"))
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": header.value("attention.sliding_window", 4096),
        "attn_logit_softcapping": float(header.value("attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": float(header.value("final_logit_softcapping", 30.0)),
        # llama.cpp knows the scale by the size of the model, its files do not say it.
        "query_pre_attn_scalar": hidden // heads if layers == _LAYERS_27B else header.value("attention.key_length"),
    }


def _restore(spec: ModelSpec, name: str, weight: Tensor) -> Tensor:
    """llama.cpp's files hold the whole weight of a norm."""
    return weight - 1.0 if name.endswith("norm.weight") else weight


GGUF = GgufFormat(
    architecture="gemma2",
    layer_names=MappingProxyType(
        {
            **LAYER_NAMES,
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }
    ),
    config=_gguf_config,
    restore=_restore,
)
