"""Rotary tables equal transformers' own, for every kind of stretching."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from isthmus_runtime.errors import WeightsError
from isthmus_runtime.layers.rope import cos_sin_tables, inverse_frequencies
from isthmus_runtime.layers.rope_spec import RopeSpec
from isthmus_runtime.models.registry import parse_model_spec

PAIRS = 12
SHORT = [1.0 + 0.05 * i for i in range(PAIRS)]
LONG = [1.5 + 0.7 * i for i in range(PAIRS)]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "theta": {"rope_theta": 5e5},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "yarn-old-key": {"rope_scaling": {"type": "yarn", "factor": 8.0}},
    "yarn-bounds": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}
    },
    "yarn-mscale": {"rope_scaling": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.1}},
    "yarn-attention": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.4}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "longrope-factor": {"rope_scaling": {**LONGROPE, "factor": 16.0}},
    "longrope-original": {"rope_scaling": LONGROPE, "original_max_position_embeddings": 64},
    "longrope-attention": {"rope_scaling": {**LONGROPE, "factor": 2.0, "attention_factor": 1.3}},
}


def config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 2 * PAIRS,
        "max_position_embeddings": 256,
        **changes,
    }


def rope(**changes: Any) -> RopeSpec:
    spec: Any = parse_model_spec(config(**changes), {}, source="config.json")
    found: RopeSpec = spec.rope
    return found


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("length", [16, 64, 65, 256, 700])
def test_tables_equal_transformers(name: str, length: int) -> None:
    """`length`: of the longest sequence, in transformers' case of the sequence at hand."""
    keys = KINDS[name]
    scaling: dict[str, Any] = keys.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type", "default")
    theirs, factor = ROPE_INIT_FUNCTIONS[kind](
        transformers.LlamaConfig(**{"rope_scaling": None, **config(**keys)}), torch.device("cpu"), seq_len=length
    )
    spec = rope(**keys)
    torch.testing.assert_close(inverse_frequencies(spec, 2 * PAIRS, length), theirs, rtol=1e-6, atol=0.0)
    assert spec.attention_factor == pytest.approx(factor, rel=1e-12)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), theirs)
    cos, sin = cos_sin_tables(spec, 2 * PAIRS, length, torch.device("cpu"))
    torch.testing.assert_close(cos, angles.cos() * factor, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(sin, angles.sin() * factor, atol=1e-4, rtol=1e-5)


def test_a_part_of_the_channels_turns() -> None:
    theirs, _ = ROPE_INIT_FUNCTIONS["default"](
        transformers.LlamaConfig(**config(partial_rotary_factor=0.75)), torch.device("cpu")
    )
    spec = RopeSpec(partial=0.75)
    assert spec.rotated(24) == 18
    torch.testing.assert_close(inverse_frequencies(spec, 24, 100), theirs, rtol=1e-6, atol=0.0)


def test_how_long_a_sequence_may_be() -> None:
    """dynamic and yarn reach past max_position_embeddings where their files give the length before stretching."""

    def longest(**changes: Any) -> int:
        return parse_model_spec(config(**changes), {}, source="x").max_position

    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert longest() == longest(rope_scaling={"rope_type": "linear", "factor": 2.0}) == 256
    assert longest(rope_scaling={"rope_type": "dynamic", "factor": 2.0}) == 512
    assert longest(rope_scaling=yarn) == 1024
    assert longest(rope_scaling={**yarn, "original_max_position_embeddings": 64}) == 256


def test_engines_of_other_lengths_make_other_keys_only_where_they_do() -> None:
    def variants(length: int, **changes: Any) -> tuple[str, ...]:
        return parse_model_spec(config(**changes), {}, source="x").kv_variants(length)

    dynamic = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    assert variants(10, **dynamic) == variants(256, **dynamic) != variants(257, **dynamic)
    longrope = KINDS["longrope-original"]
    assert variants(10, **longrope) == variants(64, **longrope) != variants(65, **longrope) == variants(200, **longrope)
    assert variants(10) == variants(1000) == variants(1000, **KINDS["yarn"]) == ()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}},
            "rope_scaling: mrope_section is",
        ),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {"rope_type": "default", "factor": 4.0}}, "factor is 4.0: not a key that rotary embeddings"),
        ({"rope_scaling": {"rope_type": "ntk-by-parts"}}, "rope_type 'ntk-by-parts' is not supported"),
        ({"rope_scaling": {**LONGROPE, "long_factor": [1.0]}}, "long_factor is a list of 1, expected a list of 12"),
        ({"rope_scaling": {**LONGROPE, "short_factor": 2.0}}, "short_factor is 2.0, expected a list of 12 numbers"),
        ({"rope_scaling": LONGROPE}, "factor is missing"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}},
            "original_max_position_embeddings 64 is not supported; known: 256",
        ),
        ({"original_max_position_embeddings": 64}, "original_max_position_embeddings is 64: not a key"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(WeightsError) as caught:
        rope(**changes)
    assert any(text in problem for problem in caught.value.problems), caught.value.problems


def test_a_problem_is_said_once() -> None:
    with pytest.raises(WeightsError) as caught:
        rope(rope_scaling={"rope_type": "yarn"})
    assert len(caught.value.problems) == 1
