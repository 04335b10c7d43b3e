"""Qwen3 MoE (30B-A3B, 235B-A22B): Qwen3's attention, with a mixture of experts in place of most layers' MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..layers.rope_spec import RopeSpec
from .base import ModelSpec, Shapes, TensorSource
from .config_reader import MOST_PARTS, ConfigReader
from .gguf_format import GgufFormat, GgufHeader
from .shapes import decoder_shapes
from .shard import WHOLE, Shard

if TYPE_CHECKING:
    import torch

    from ..layers.moe import MoeMlp
    from .decoder import Decoder, Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeSpec(ModelSpec):
    """Pre-norm decoder with grouped-query attention over normed heads; the MLP of a sparse layer is one of experts."""

    rope: RopeSpec
    attention_bias: bool
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    moe_intermediate_size: int
    sparse: tuple[bool, ...]
    """Per layer: whether its MLP is a mixture."""

    def tensor_shapes(self) -> Shapes:
        bias, mixtures = self.attention_bias, [number for number, sparse in enumerate(self.sparse) if sparse]
        shapes = decoder_shapes(self, qkv_bias=bias, output_bias=bias, qk_norm=True, mixtures=mixtures)
        hidden, inner = self.hidden_size, self.moe_intermediate_size
        for number in mixtures:
            mlp = f"model.layers.{number}.mlp"
            shapes[f"{mlp}.gate.weight"] = (self.num_experts, hidden)
            for expert in range(self.num_experts):
                shapes[f"{mlp}.experts.{expert}.gate_proj.weight"] = (inner, hidden)
                shapes[f"{mlp}.experts.{expert}.up_proj.weight"] = (inner, hidden)
                shapes[f"{mlp}.experts.{expert}.down_proj.weight"] = (hidden, inner)
        return shapes

    def active_fraction(self, name: str) -> float:
        return self.num_experts_per_tok / self.num_experts if ".experts." in name else 1.0

    def build(self, source: TensorSource, dtype: torch.dtype, shard: Shard = WHOLE) -> Decoder:
        from .decoder import Decoder, Parts

        parts = Parts(self, source, dtype, shard)
        layers = [
            parts.layer(number, self._mixture(parts, number) if sparse else None)
            for number, sparse in enumerate(self.sparse)
        ]
        return Decoder(parts, layers, ropes=[self.rope])

    def _mixture(self, parts: Parts, number: int) -> MoeMlp:
        from ..layers.moe import MoeMlp

        at = f"model.layers.{number}.mlp"
        return MoeMlp(
            router=parts.router(f"{at}.gate"),
            weights=parts.experts(f"{at}.experts", self.num_experts),
            top_k=self.num_experts_per_tok,
            renormalize=self.norm_topk_prob,
        )


def parse(read: ConfigReader) -> Qwen3MoeSpec:
    """The record of a Qwen3 MoE's `config.json`."""
    common = read.common(max_position=32768)
    read.only("hidden_act", "silu")
    experts, chosen = read.integer("num_experts", 128, MOST_PARTS), read.integer("num_experts_per_tok", 8)
    if chosen > experts:
        read.problem("num_experts_per_tok", f"{chosen} is more than num_experts {experts}")
    period, dense = read.integer("decoder_sparse_step", 1), read.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        read.problem("mlp_only_layers", f"is {dense!r:.100}, expected a list of layers")
        dense = []
    spec = Qwen3MoeSpec(
        **common,
        windows=_windows(read, common["num_layers"]),
        rope=read.rope(),
        attention_bias=read.boolean("attention_bias", False),
        num_experts=experts,
        num_experts_per_tok=chosen,
        norm_topk_prob=read.boolean("norm_topk_prob", False),
        moe_intermediate_size=read.integer("moe_intermediate_size", 768),
        sparse=tuple(n not in dense and (n + 1) % period == 0 for n in range(common["num_layers"])),
    )
    # For training.
    read.finish("router_aux_loss_coef", "output_router_logits")
    return spec


def _windows(read: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """All layers have the window or none, unlike Qwen3's: transformers reads no `max_window_layers` here."""
    read.get("max_window_layers")
    window = read.optional_integer("sliding_window", 4096)
    return (window if read.boolean("use_sliding_window", False) else None,) * num_layers


def _gguf_config(header: GgufHeader) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "num_experts": header.value("expert_count"),
        "num_experts_per_tok": header.value("expert_used_count"),
        "moe_intermediate_size": header.value("expert_feed_forward_length"),
        # llama.cpp computes it so whatever the release was.
        "norm_topk_prob": True,
    }


GGUF = GgufFormat(architecture="qwen3moe", config=_gguf_config)
