"""Configurations of releases are read whole, and have as many parameters as was published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus_runtime.models.registry import parse_model_spec
from isthmus_runtime.sim.hardware import find_model

PHI3_MINI_4K: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    "bos_token_id": 1,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32064,
}
PHI4_MINI: dict[str, Any] = {
    **PHI3_MINI_4K,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 131072,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0 + i for i in range(48)]},
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
GEMMA2_2B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "vocab_size": 201088,
}


@pytest.mark.parametrize(
    ("config", "billions"), [(PHI3_MINI_4K, 3.82), (PHI4_MINI, 3.84), (GEMMA2_2B, 2.61), (GPT_OSS_20B, 20.9)]
)
def test_counts_of_the_releases(config: dict[str, Any], billions: float, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_model(str(tmp_path)).parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_what_they_say() -> None:
    def parse(config: dict[str, Any]) -> Any:
        return parse_model_spec(config, {}, source="config.json")

    assert parse(PHI3_MINI_4K).windows == (2047,) * 32
    phi4 = parse(PHI4_MINI)
    assert phi4.windows == (None,) * 32
    assert (phi4.rope.kind, phi4.rope.rotated(128), phi4.rope.original_max_position) == ("longrope", 96, 4096)
    assert parse(GEMMA2_2B).windows == (4096, None) * 13
    oss = parse(GPT_OSS_20B)
    assert oss.windows == (128, None) * 12 and oss.quantization.method == "mxfp4"
    assert (oss.rope.theta, oss.max_position, oss.rope.truncate) == (150000.0, 131072, False)
    # What transformers assumes where the file says nothing of it.
    silent = {key: value for key, value in GPT_OSS_20B.items() if key not in ("rope_scaling", "rope_theta")}
    assert parse(silent).rope == oss.rope
