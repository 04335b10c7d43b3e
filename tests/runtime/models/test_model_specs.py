"""config.json to each family's record: what is read, and what is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isthmus_runtime.errors import WeightsError
from isthmus_runtime.layers.rope_spec import RopeSpec
from isthmus_runtime.models.registry import FAMILIES, parse_model_spec, read_model_spec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def parse(**changes: Any) -> Any:
    return parse_model_spec({**LLAMA, **changes}, {}, source="config.json")


def refused(**changes: Any) -> tuple[str, ...]:
    with pytest.raises(WeightsError) as caught:
        parse(**changes)
    return caught.value.problems


def test_defaults_of_llama() -> None:
    spec = parse(torch_dtype="bfloat16", eos_token_id=[2, 3])
    assert (spec.head_dim, spec.num_kv_heads, spec.rms_norm_eps) == (8, 2, 1e-6)
    assert spec.rope == RopeSpec(theta=10000.0)
    assert spec.windows == (None,) * 4
    assert not (spec.tie_word_embeddings or spec.attention_bias or spec.mlp_bias)
    assert (spec.dtype, spec.eos_token_ids) == ("bfloat16", (2, 3))


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        (
            architecture,
            architecture.replace("Gemma3ForCausalLM", "Gemma3TextForCausalLM").replace("ForCausalLM", "Config"),
        )
        for architecture in FAMILIES
    ],
)
def test_what_a_file_does_not_say_is_as_transformers_has_it(architecture: str, config: str) -> None:
    import transformers

    expected = getattr(transformers, config)(num_attention_heads=6, num_key_value_heads=2)
    given = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
    if architecture.startswith("Deepseek"):
        given["num_key_value_heads"] = 6
    spec = parse_model_spec({**given, "architectures": [architecture]}, {}, source="config.json")
    assert (spec.max_position, spec.rms_norm_eps) == (expected.max_position_embeddings, expected.rms_norm_eps)
    assert spec.tie_word_embeddings == expected.tie_word_embeddings
    assert all(window in (None, getattr(expected, "sliding_window", None)) for window in spec.windows)


def test_generation_config_decides_the_end_tokens() -> None:
    assert parse_model_spec({**LLAMA, "eos_token_id": 2}, {"eos_token_id": [5, 6]}, source="x").eos_token_ids == (5, 6)


def test_rope_of_both_transformers_generations() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = parse(rope_theta=500000.0, rope_scaling=scaling).rope
    new = parse(rope_parameters={**scaling, "rope_theta": 500000.0}).rope
    assert old == new == RopeSpec(theta=500000.0, kind="llama3", factor=8.0)
    assert parse(rope_scaling={"type": "linear", "factor": 2.0}).rope == RopeSpec(kind="linear", factor=2.0)


def test_windows() -> None:
    assert parse(architectures=["MistralForCausalLM"], sliding_window=9).windows == (9,) * 4
    assert parse(architectures=["MistralForCausalLM"], sliding_window=None).windows == (None,) * 4
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9}
    assert parse(**qwen, use_sliding_window=False).windows == (None,) * 4
    assert parse(**qwen, use_sliding_window=True, max_window_layers=3).windows == (None, None, None, 9)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert parse(**qwen, use_sliding_window=True, layer_types=kinds).windows == (9, None, 9, None)


def optional_parts(**changes: Any) -> set[str]:
    """The tensors of layer 0 that not every family has."""
    usual = {f"self_attn.{p}_proj.weight" for p in "qkvo"} | {f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    usual |= {"input_layernorm.weight", "post_attention_layernorm.weight"}
    names = [name for name in parse(**changes).tensor_shapes() if name.startswith("model.layers.0.")]
    return {name.removeprefix("model.layers.0.") for name in names} - usual


def test_biases_and_norms_follow_the_architecture() -> None:
    qkv = {f"self_attn.{p}_proj.bias" for p in "qkv"}
    output, mlp = {"self_attn.o_proj.bias"}, {f"mlp.{p}_proj.bias" for p in ("gate", "up", "down")}
    biases = {"attention_bias": True, "mlp_bias": True}
    assert optional_parts() == set()
    assert optional_parts(**biases) == qkv | output | mlp
    assert optional_parts(architectures=["MistralForCausalLM"], **biases) == set()
    assert optional_parts(architectures=["Qwen2ForCausalLM"]) == qkv
    norms = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    assert optional_parts(architectures=["Qwen3ForCausalLM"]) == norms
    assert optional_parts(architectures=["Qwen3ForCausalLM"], attention_bias=True) == norms | qkv | output
    assert parse(architectures=["Qwen3ForCausalLM"]).head_dim == 128


@pytest.mark.parametrize("architecture", FAMILIES)
def test_an_unknown_key_that_is_set_is_refused(architecture: str) -> None:
    base = {"architectures": [architecture], "use_cache": True, "_name_or_path": "x", "transformers_version": "4.57"}
    parse(**base, rope_interleaved=False, rope_theta_of_the_future=None)
    (problem,) = refused(**base, rope_interleaved=True)
    assert problem.startswith("config.json: rope_interleaved is True: not a key that this architecture")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "'MambaForCausalLM' is not supported; known: DeepseekV2ForCausalLM, ",
        ),
        ({"architectures": None}, "architecture None"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4}}, "rope_type 'ntk' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (
            {"quantization_config": {"quant_method": "gguf"}},
            "quantization_config: quant_method 'gguf' is not supported",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "bits 3 is not supported; known: 2, 4, 8"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}}, "version 'gemv'"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e3m4"}}, "fmt 'e3m4' is not supported"),
        ({"quantization_config": {"quant_method": "fp8", "rotation": "hadamard"}}, "rotation is 'hadamard': not a key"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}, "format 'pack-"),
        ({"num_key_value_heads": 4}, "6 is not a multiple of num_key_value_heads 4"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"rope_theta": float("inf")}, "rope_theta is inf, expected a number above 0, and at most 1e+18"),
        ({"hidden_size": 2**31}, "hidden_size is 2147483648, expected a whole number of at least 1, and at most 2147"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected a whole number of at least 1, and"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e308}}, "factor is 1e+308"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": 5}, "mlp_only_layers is 5, expected a list"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 10**9}, "num_experts is 1000000000"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is None"),
    ],
)
def test_refusals_name_the_key_and_the_value(changes: dict[str, Any], text: str) -> None:
    assert any(text in problem for problem in refused(**changes))


def test_every_problem_is_listed_at_once() -> None:
    assert len(refused(vocab_size=0, hidden_act="relu", rope_scaling={"type": "dynamic", "factor": -2.0})) == 3


def test_files(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"config\.json is missing"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WeightsError, match="cannot be read as JSON"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(WeightsError, match="expected a JSON object"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert read_model_spec(tmp_path).eos_token_ids == (7,)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_reading_a_configuration_needs_no_torch(architecture: str) -> None:
    code = f"""
import sys
from isthmus_runtime.models.registry import parse_model_spec
spec = parse_model_spec({ {**LLAMA, "architectures": [architecture]}!r}, {{}}, source="config.json")
assert spec.tensor_shapes() and spec.layer_specs(16, "bf16")
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
