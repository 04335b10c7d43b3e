"""Qwen3 MoE: its configuration, and the counts of a release. Its tokens: tests/runtime/executor/test_generation.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus_runtime.errors import WeightsError
from isthmus_runtime.models.registry import parse_model_spec
from isthmus_runtime.sim.hardware import find_model

# Qwen3-30B-A3B.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "moe_intermediate_size": 768,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "router_aux_loss_coef": 0.001,
}


def parse(**changes: Any) -> Any:
    return parse_model_spec({**CONFIG, **changes}, {}, source="config.json")


def test_which_layers_are_mixtures() -> None:
    assert parse().sparse == (True,) * 48
    assert parse(num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[3]).sparse == (False, True) + (False,) * 3
    shapes = parse(num_hidden_layers=2, mlp_only_layers=[0], num_experts=3, num_experts_per_tok=1).tensor_shapes()
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (6144, 2048)
    assert shapes["model.layers.1.mlp.experts.2.up_proj.weight"] == (768, 2048)
    assert shapes["model.layers.1.mlp.gate.weight"] == (3, 2048)
    assert not any("layers.1.mlp.up_proj" in name or "layers.0.mlp.gate.w" in name for name in shapes)


def test_more_experts_than_there_are() -> None:
    with pytest.raises(WeightsError, match="num_experts_per_tok 8 is more than num_experts 4"):
        parse(num_experts=4)


def test_counts_of_the_30b_release(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shape = find_model(str(tmp_path))
    # Published as 30.5 and 3.3 billion; of the latter the embedding of the input is not multiplied with.
    assert round(shape.parameters / 1e9, 1) == 30.5
    assert round((shape.active_parameters + 151936 * 2048) / 1e9, 2) == 3.35
