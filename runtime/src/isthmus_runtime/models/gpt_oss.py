"""GPT-OSS: attention with sinks, every other layer windowed, and a mixture of experts with a clamped activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..layers.rope_spec import RopeSpec
from .base import ModelSpec, Shapes, TensorSource
from .config_reader import MOST_PARTS, ConfigReader
from .shapes import decoder_shapes
from .shard import WHOLE, Shard

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..layers.moe import ExpertWeights, MoeMlp
    from .decoder import Decoder, Parts

_ALPHA = 1.702
# What transformers assumes.
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssSpec(ModelSpec):
    """Pre-norm decoder with grouped-query attention; every projection and every expert has biases."""

    rope: RopeSpec
    num_experts: int
    num_experts_per_tok: int
    swiglu_limit: float

    def tensor_shapes(self) -> Shapes:
        layers = range(self.num_layers)
        shapes = decoder_shapes(self, qkv_bias=True, output_bias=True, mixtures=layers)
        count, hidden, inner = self.num_experts, self.hidden_size, self.intermediate_size
        for number in layers:
            at = f"model.layers.{number}"
            shapes[f"{at}.self_attn.sinks"] = (self.num_heads,)
            shapes[f"{at}.mlp.router.weight"] = (count, hidden)
            shapes[f"{at}.mlp.router.bias"] = (count,)
            # Inputs first, gate and up columns in turn.
            shapes[f"{at}.mlp.experts.gate_up_proj"] = (count, hidden, 2 * inner)
            shapes[f"{at}.mlp.experts.gate_up_proj_bias"] = (count, 2 * inner)
            shapes[f"{at}.mlp.experts.down_proj"] = (count, inner, hidden)
            shapes[f"{at}.mlp.experts.down_proj_bias"] = (count, hidden)
        return shapes

    def active_fraction(self, name: str) -> float:
        return self.num_experts_per_tok / self.num_experts if ".experts." in name else 1.0

    def build(self, source: TensorSource, dtype: torch.dtype, shard: Shard = WHOLE) -> Decoder:
        from .decoder import Decoder, Parts

        parts = Parts(self, source, dtype, shard)
        layers = [parts.layer(number, self._mixture(parts, number)) for number in range(self.num_layers)]
        return Decoder(parts, layers, ropes=[self.rope])

    def _mixture(self, parts: Parts, number: int) -> MoeMlp:
        from ..layers.moe import MoeMlp

        at = f"model.layers.{number}.mlp"
        return MoeMlp(
            router=parts.router(f"{at}.router"),
            weights=self._experts(parts, f"{at}.experts.gate_up_proj", f"{at}.experts.down_proj"),
            gate_up_bias=_gate_first(parts.take(f"{at}.experts.gate_up_proj_bias")),
            down_bias=parts.take(f"{at}.experts.down_proj_bias"),
            top_k=self.num_experts_per_tok,
            # The softmax over the chosen alone is the softmax over all, scaled.
            renormalize=True,
            clamp=(_ALPHA, self.swiglu_limit),
        )

    def _experts(self, parts: Parts, gate_up: str, down: str) -> ExpertWeights:
        from ..layers.moe import ExpertWeights

        packed = parts.packed(gate_up, down)
        if packed is None:
            first = _gate_first(parts.take(gate_up).transpose(1, 2))
            return ExpertWeights(first, parts.take(down).transpose(1, 2).contiguous())
        (first, first_scale), (second, second_scale) = packed
        return ExpertWeights(_gate_first(first), second, _gate_first(first_scale), second_scale)


def _gate_first(rows: Tensor) -> Tensor:
    """[E, 2 I, ...] with gate and up rows in turn to gate rows first."""
    import torch

    return torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1)


def parse(read: ConfigReader) -> GptOssSpec:
    """The record of a GPT-OSS's `config.json`."""
    if not read.get("rope_parameters"):
        read.assume("rope_scaling", _ROPE)
    read.assume("rope_theta", 150000.0)
    common = read.common(head_dim=64, max_position=131072, eps=1e-5)
    read.only("hidden_act", "silu")
    read.only("attention_bias", True)
    experts, chosen = read.integer("num_local_experts", 128, MOST_PARTS), read.integer("num_experts_per_tok", 4)
    if chosen > experts:
        read.problem("num_experts_per_tok", f"{chosen} is more than num_local_experts {experts}")
    read.only("experts_per_token", chosen)
    layers, window = common["num_layers"], read.integer("sliding_window", 128)
    local = read.layer_types(layers) or tuple(number % 2 == 0 for number in range(layers))
    spec = GptOssSpec(
        **common,
        windows=tuple(window if is_local else None for is_local in local),
        rope=read.rope(),
        num_experts=experts,
        num_experts_per_tok=chosen,
        swiglu_limit=read.number("swiglu_limit", 7.0),
    )
    # For training, and the length before stretching, which rope_scaling says.
    read.finish("router_aux_loss_coef", "output_router_logits", "initial_context_length")
    return spec
