"""DeepSeek V2 and V3: configurations, what they keep as KV, and the counts of the releases. Their tokens:
tests/runtime/executor/test_generation.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus_runtime.config import ModelConfig
from isthmus_runtime.errors import ConfigError, WeightsError
from isthmus_runtime.executor.device.cpu import CpuDevice
from isthmus_runtime.executor.loading import load
from isthmus_runtime.kv.groups import LayerSpec
from isthmus_runtime.models.registry import parse_model_spec
from isthmus_runtime.sim.hardware import find_model

# DeepSeek-V3.
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
LITE: dict[str, Any] = {
    **{key: value for key, value in V3.items() if key not in ("quantization_config", "num_nextn_predict_layers")},
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}


def parse(base: dict[str, Any], **changes: Any) -> Any:
    return parse_model_spec({**base, **changes}, {}, source="config.json")


def test_one_row_a_token_is_kept() -> None:
    spec = parse(V3)
    (layer,) = spec.layer_specs(64, "bf16")
    assert layer == LayerSpec(kind="mla", layers=61, block_size=64, dtype="bf16", width=576)
    assert layer.page_bytes == 64 * 576 * 2
    assert (spec.num_kv_heads, spec.head_dim) == (1, 576)


def test_what_v3_and_lite_say() -> None:
    spec = parse(V3)
    assert spec.expert_groups == (8, 4) and spec.sigmoid and spec.dense_layers == 3
    assert spec.unused_tensors == ("model.layers.61.",)
    # yarn at 40: 0.1 ln 40 + 1 on queries and on keys; on the tables the quotient of both, which is 1.
    assert spec.attention_scale == pytest.approx(192**-0.5 * 1.3688879454**2)
    assert spec.rope.attention_factor == 1.0
    lite = parse(LITE)
    assert lite.expert_groups is None and not lite.sigmoid and lite.q_lora_rank is None
    shapes = lite.tensor_shapes()
    assert shapes["model.layers.1.mlp.shared_experts.up_proj.weight"] == (2816, 2048)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (16 * 192, 2048)
    assert not any("q_a_proj" in name or "layers.0.mlp.gate.w" in name for name in shapes)


@pytest.mark.parametrize(("base", "total", "active"), [(V3, 671.0, 37.5), (LITE, 15.7, 2.7)])
def test_counts_of_the_releases(base: dict[str, Any], total: float, active: float, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(base))
    shape = find_model(str(tmp_path))
    assert shape.parameters / 1e9 == pytest.approx(total, rel=0.005)
    # Published with the embedding, of which a token reads one row.
    embedding = base["vocab_size"] * base["hidden_size"]
    assert (shape.active_parameters + embedding) / 1e9 == pytest.approx(active, rel=0.02)
    assert shape.kv_bytes_per_token == base["num_hidden_layers"] * 576 * 2


@pytest.mark.parametrize(
    ("base", "changes", "text"),
    [
        (V3, {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; known: sigmoid"),
        (V3, {"topk_method": "greedy"}, "topk_method 'greedy' is not supported; known: noaux_tc"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        (V3, {"n_group": 7}, "n_group 7 with topk_group 4 does not divide 256 experts"),
        (V3, {"head_dim": 128}, "head_dim 128 is not supported; known: 64"),
        (V3, {"index_topk": 2048}, "index_topk is 2048: not a key"),
        (LITE, {"norm_topk_prob": True}, "norm_topk_prob True"),
        (LITE, {"mlp_bias": True}, "mlp_bias True"),
        (LITE, {"num_experts_per_tok": 65}, "num_experts_per_tok 65 is more than n_routed_experts 64"),
    ],
)
def test_what_is_not_computed_is_refused(base: dict[str, Any], changes: dict[str, Any], text: str) -> None:
    with pytest.raises(WeightsError) as caught:
        parse(base, **changes)
    assert any(text in problem for problem in caught.value.problems), caught.value.problems


class _Gpu(CpuDevice):
    name = "cuda:0"
    torch_device = torch.device("cuda:0")


def test_rows_alike_in_any_batch_are_refused_on_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LITE))
    with pytest.raises(
        ConfigError, match=r"--deterministic on: DeepseekV2ForCausalLM has operations whose .* on cuda:0"
    ):
        load(ModelConfig(path=str(tmp_path), deterministic=True), device=_Gpu())
