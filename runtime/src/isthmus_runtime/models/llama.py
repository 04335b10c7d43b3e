"""Llama 1 to 3.x, and what copies it (SmolLM2, ...)."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import WeightsError
from ..layers.rope_spec import RopeSpec
from .base import ModelSpec, Shapes, TensorSource
from .config_reader import ConfigReader
from .gguf_format import GgufFormat, GgufHeader
from .shapes import decoder_shapes
from .shard import WHOLE, Shard

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSpec(ModelSpec):
    """Pre-norm decoder with grouped-query attention over the whole prefix and a gated SiLU MLP."""

    sharded: ClassVar[bool] = True

    rope: RopeSpec
    attention_bias: bool
    """Biases of all four projections of the attention."""
    mlp_bias: bool

    def tensor_shapes(self) -> Shapes:
        return decoder_shapes(
            self, qkv_bias=self.attention_bias, output_bias=self.attention_bias, mlp_bias=self.mlp_bias
        )

    def build(self, source: TensorSource, dtype: torch.dtype, shard: Shard = WHOLE) -> Decoder:
        from .decoder import Decoder, Parts

        parts = Parts(self, source, dtype, shard)
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


# What llama.cpp's converter makes of the rotary scaling of Llama 3.1 and later: a divisor for each channel pair.
_ROPE_FREQS = "rope_freqs.weight"
# As all releases have it; they differ in the factor.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _gguf_config(header: GgufHeader) -> dict[str, Any]:
    config = {"hidden_act": "silu", "attention_bias": "blk.0.attn_q.bias" in header.tensors}
    return {**config, "rope_scaling": _llama3(header)} if _ROPE_FREQS in header.tensors else config


def _llama3(header: GgufHeader) -> dict[str, Any]:
    """The scaling that gives the divisors of the file. WeightsError where none of Llama 3's kind does."""
    found = header.numbers(_ROPE_FREQS)
    factor, theta = max(found), float(header.value("rope.freq_base", 10000.0))
    low, high, original = _LLAMA3.values()
    for pair, divisor in enumerate(found):
        turns = original / (2 * pi * theta ** (pair / len(found)))
        blend = min(1.0, max(0.0, (turns - low) / (high - low)))
        if abs(divisor * ((1 - blend) / factor + blend) - 1) > 1e-3:
            raise WeightsError(
                f"{header.source}: {_ROPE_FREQS}[{pair}] is {divisor:.5g}, which no scaling of Llama 3's kind gives; "
                "fetch the original safetensors model instead"
            )
    return {"rope_type": "llama3", "factor": round(factor, 4), **_LLAMA3}


def _unpermute(spec: ModelSpec, name: str, weight: Tensor) -> Tensor:
    """llama.cpp stores q and k rows so that rotated pairs are neighbours; ours are half a head apart."""
    part = name.split(".")[-2]
    if part not in ("q_proj", "k_proj"):
        return weight
    heads, rows = spec.num_heads if part == "q_proj" else spec.num_kv_heads, weight.shape[0]
    pairs = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


GGUF = GgufFormat(architecture="llama", extra_tensors=(_ROPE_FREQS,), config=_gguf_config, restore=_unpermute)
