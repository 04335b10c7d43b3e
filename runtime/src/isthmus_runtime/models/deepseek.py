"""DeepSeek V2 (also Lite) and V3 (also R1): latent attention, and mixtures of experts beside shared ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..kv.groups import LayerSpec
from ..layers.rope_spec import RopeSpec
from .base import ModelSpec, Shapes, TensorSource
from .config_reader import MOST_PARTS, ConfigReader
from .rope_config import yarn_mscale
from .shapes import decoder_shapes
from .shard import WHOLE, Shard

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..layers.latent_attention import LatentAttention
    from ..layers.moe import MoeMlp
    from .decoder import Decoder, DecoderLayer, Parts

# Of the norms within the attention, whatever rms_norm_eps says.
_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekSpec(ModelSpec):
    """Pre-norm decoder. To the KV cache it has one head, as wide as a latent and the part of a key that turns."""

    row_invariant: ClassVar[bool] = False  # on a GPU its routing and what brings queries to latents are PyTorch's

    rope: RopeSpec
    q_lora_rank: int | None
    """Width of the queries' bottleneck, where they have one."""
    kv_lora_rank: int
    """Width of a latent."""
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    attention_scale: float
    attention_bias: bool
    rope_interleave: bool
    """Channels that turn together are neighbours in the checkpoint."""
    dense_layers: int
    """So many first layers have a plain MLP."""
    num_experts: int
    num_experts_per_tok: int
    shared_experts: int
    moe_intermediate_size: int
    sigmoid: bool
    """V3: experts' scores are sigmoids, and a bias balances the choice."""
    expert_groups: tuple[int, int] | None
    """Groups of experts, and how many of them a token may choose from."""
    norm_topk_prob: bool
    routed_scaling_factor: float
    next_token_layers: int
    """Layers of the checkpoint that predict further tokens; not loaded."""

    @property
    def unused_tensors(self) -> tuple[str, ...]:
        return tuple(f"model.layers.{self.num_layers + number}." for number in range(self.next_token_layers))

    def tensor_shapes(self) -> Shapes:
        mixtures = range(self.dense_layers, self.num_layers)
        shapes = decoder_shapes(self, mixtures=mixtures, attention=False)
        hidden, count, inner = self.hidden_size, self.num_experts, self.moe_intermediate_size
        for number in range(self.num_layers):
            self._attention_shapes(shapes, f"model.layers.{number}.self_attn")
        for number in mixtures:
            at = f"model.layers.{number}.mlp"
            shapes[f"{at}.gate.weight"] = (count, hidden)
            if self.sigmoid:
                shapes[f"{at}.gate.e_score_correction_bias"] = (count,)
            mlps = {f"{at}.experts.{expert}": inner for expert in range(count)}
            if self.shared_experts:
                mlps[f"{at}.shared_experts"] = inner * self.shared_experts
            for mlp, width in mlps.items():
                shapes[f"{mlp}.gate_proj.weight"] = (width, hidden)
                shapes[f"{mlp}.up_proj.weight"] = (width, hidden)
                shapes[f"{mlp}.down_proj.weight"] = (hidden, width)
        return shapes

    def _attention_shapes(self, shapes: Shapes, at: str) -> None:
        hidden, heads, latent = self.hidden_size, self.num_heads, self.kv_lora_rank
        queries = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        biased = {
            f"{at}.kv_a_proj_with_mqa": (self.head_dim, hidden),
            f"{at}.o_proj": (hidden, heads * self.v_head_dim),
        }
        if self.q_lora_rank is None:
            shapes[f"{at}.q_proj.weight"] = (queries, hidden)
        else:
            biased[f"{at}.q_a_proj"] = (self.q_lora_rank, hidden)
            shapes[f"{at}.q_a_layernorm.weight"] = (self.q_lora_rank,)
            shapes[f"{at}.q_b_proj.weight"] = (queries, self.q_lora_rank)
        for name, shape in biased.items():
            shapes[f"{name}.weight"] = shape
            if self.attention_bias:
                shapes[f"{name}.bias"] = shape[:1]
        shapes[f"{at}.kv_a_layernorm.weight"] = (latent,)
        shapes[f"{at}.kv_b_proj.weight"] = (heads * (self.qk_nope_head_dim + self.v_head_dim), latent)

    def active_fraction(self, name: str) -> float:
        return self.num_experts_per_tok / self.num_experts if ".experts." in name else 1.0

    def layer_specs(self, block_size: int, dtype: str, ranks: int = 1) -> tuple[LayerSpec, ...]:
        return (LayerSpec(kind="mla", layers=self.num_layers, block_size=block_size, dtype=dtype, width=self.head_dim),)

    def build(self, source: TensorSource, dtype: torch.dtype, shard: Shard = WHOLE) -> Decoder:
        from .decoder import Decoder, Parts

        parts = Parts(self, source, dtype, shard)
        layers = [self._layer(parts, number) for number in range(self.num_layers)]
        return Decoder(parts, layers, ropes=[self.rope], rope_dim=self.qk_rope_head_dim)

    def _layer(self, parts: Parts, number: int) -> DecoderLayer:
        from .decoder import DecoderLayer

        at = f"model.layers.{number}"
        return DecoderLayer(
            attention_norm=parts.norm(f"{at}.input_layernorm"),
            attention=self._attention(parts, f"{at}.self_attn"),
            mlp_norm=parts.norm(f"{at}.post_attention_layernorm"),
            mlp=parts.mlp(f"{at}.mlp") if number < self.dense_layers else self._mixture(parts, f"{at}.mlp"),
        )

    def _attention(self, parts: Parts, at: str) -> LatentAttention:
        from ..layers.latent_attention import LatentAttention
        from ..layers.linear import HeadLinear

        heads, nope, latent = self.num_heads, self.qk_nope_head_dim, self.kv_lora_rank
        narrow = self.q_lora_rank is not None
        up = parts.take(f"{at}.kv_b_proj.weight").view(heads, nope + self.v_head_dim, latent)
        return LatentAttention(
            query_down=parts.linear(f"{at}.q_a_proj") if narrow else None,
            query_norm=parts.norm(f"{at}.q_a_layernorm", _EPS) if narrow else None,
            query_up=parts.linear(f"{at}.q_b_proj" if narrow else f"{at}.q_proj", rows=self._halves_of_heads),
            latent=parts.linear(f"{at}.kv_a_proj_with_mqa", rows=self._halves_of_latent),
            latent_norm=parts.norm(f"{at}.kv_a_layernorm", _EPS),
            key_up=HeadLinear(up[:, :nope].contiguous()),
            value_up=HeadLinear(up[:, nope:].transpose(1, 2).contiguous()),
            output=parts.linear(f"{at}.o_proj"),
            scale=self.attention_scale,
        )

    def _halves_of_heads(self, rows: Tensor) -> Tensor:
        heads = rows.view(self.num_heads, -1, *rows.shape[1:])
        return self._halves(heads.transpose(0, 1)).transpose(0, 1).reshape(rows.shape)

    def _halves_of_latent(self, rows: Tensor) -> Tensor:
        return self._halves(rows)

    def _halves(self, rows: Tensor) -> Tensor:
        """The rows of channels that turn, which are the last, from pairs of neighbours to halves. Queries and keys
        change alike, so that their products stay."""
        import torch

        if not self.rope_interleave:
            return rows
        plain = rows.shape[0] - self.qk_rope_head_dim
        turned = rows[plain:]
        return torch.cat([rows[:plain], turned[0::2], turned[1::2]])

    def _mixture(self, parts: Parts, at: str) -> MoeMlp:
        from ..layers.moe import MoeMlp

        return MoeMlp(
            router=parts.router(f"{at}.gate"),
            weights=parts.experts(f"{at}.experts", self.num_experts),
            top_k=self.num_experts_per_tok,
            renormalize=self.norm_topk_prob,
            sigmoid=self.sigmoid,
            choice_bias=parts.wide(f"{at}.gate.e_score_correction_bias") if self.sigmoid else None,
            groups=self.expert_groups,
            scale=self.routed_scaling_factor,
            shared=parts.mlp(f"{at}.shared_experts") if self.shared_experts else None,
        )


def parse(read: ConfigReader) -> DeepseekSpec:
    """The record of a `config.json` of DeepSeek V2 or V3."""
    v3 = read.get("architectures") == ["DeepseekV3ForCausalLM"]
    common = read.common(max_position=4096 if v3 else 2048)
    read.only("hidden_act", "silu")
    read.only("mlp_bias", False)
    read.only("moe_layer_freq", 1)
    read.only("scoring_func", "sigmoid" if v3 else "softmax")
    rope_dim, nope = read.integer("qk_rope_head_dim", 64), read.integer("qk_nope_head_dim", 128)
    latent, layers = read.integer("kv_lora_rank", 512), common["num_layers"]
    read.only("head_dim", rope_dim)
    read.only("qk_head_dim", nope + rope_dim)
    if not v3:
        # transformers has no other for it.
        read.only("norm_topk_prob", False)
    experts, chosen, groups = _routing(read, v3)
    scale, deep = (nope + rope_dim) ** -0.5, read.scaling().optional_number("mscale_all_dim")
    if deep is not None:
        # Longer contexts sharpen attention; half of it is in queries, half in keys.
        scale *= yarn_mscale(read.scaling().number("factor"), deep) ** 2
    # As the KV cache sees it.
    common["num_kv_heads"], common["head_dim"] = 1, latent + rope_dim
    spec = DeepseekSpec(
        **common,
        windows=(None,) * layers,
        rope=read.rope(head_dim=rope_dim),
        q_lora_rank=read.optional_integer("q_lora_rank", 1536),
        kv_lora_rank=latent,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope_dim,
        v_head_dim=read.integer("v_head_dim", 128),
        attention_scale=scale,
        attention_bias=read.boolean("attention_bias", False),
        rope_interleave=read.boolean("rope_interleave", True) if v3 else True,
        dense_layers=min(layers, read.count("first_k_dense_replace", 3 if v3 else 0)),
        num_experts=experts,
        num_experts_per_tok=chosen,
        shared_experts=read.count("n_shared_experts", 1 if v3 else 2),
        moe_intermediate_size=read.integer("moe_intermediate_size", 2048 if v3 else 1407),
        sigmoid=v3,
        expert_groups=groups,
        norm_topk_prob=read.boolean("norm_topk_prob", v3),
        routed_scaling_factor=read.number("routed_scaling_factor", 2.5 if v3 else 1.0),
        next_token_layers=read.count("num_nextn_predict_layers", 0),
    )
    # For training and for experts spread over engines; auto_map names code that came before transformers knew them.
    read.finish("auto_map", "aux_loss_alpha", "ep_size", "seq_aux")
    return spec


def _routing(read: ConfigReader, v3: bool) -> tuple[int, int, tuple[int, int] | None]:
    """Experts, how many a token goes through, and their groups."""
    experts = read.integer("n_routed_experts", 256 if v3 else 64, MOST_PARTS)
    chosen = read.integer("num_experts_per_tok", 8 if v3 else 6)
    method = read.text("topk_method", "noaux_tc" if v3 else "greedy")
    known = ("noaux_tc",) if v3 else ("greedy", "group_limited_greedy")
    if method not in known:
        read.problem("topk_method", f"{method!r} is not supported; known: {', '.join(known)}")
    count, kept = (
        read.optional_integer("n_group", 8 if v3 else None),
        read.optional_integer("topk_group", 4 if v3 else None),
    )
    if chosen > experts:
        read.problem("num_experts_per_tok", f"{chosen} is more than n_routed_experts {experts}")
    if method == "greedy":
        return experts, chosen, None
    if count is None or kept is None or experts % count or kept > count or chosen > experts // count * kept:
        read.problem(
            "n_group",
            f"{count} with topk_group {kept} does not divide {experts} experts so that {chosen} can be chosen",
        )
        return experts, chosen, None
    return experts, chosen, (count, kept)
