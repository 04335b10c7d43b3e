"""Gemma 3: its configuration, and a real vocabulary."""

from __future__ import annotations

import json
from typing import Any

import pytest
from real_models import gemma3_270m
from tokenizers import Tokenizer

from isthmus_runtime.errors import WeightsError
from isthmus_runtime.layers.rope_spec import RopeSpec
from isthmus_runtime.models.registry import parse_model_spec

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "sliding_window": 9,
    "hidden_activation": "gelu_pytorch_tanh",
    "cache_implementation": "hybrid",
    "attn_logit_softcapping": None,
}


def parse(**changes: Any) -> Any:
    return parse_model_spec({**CONFIG, **changes}, {}, source="config.json")


def test_defaults_of_the_family() -> None:
    spec = parse()
    assert spec.windows == (9, 9, 9, 9, 9, None, 9, 9)
    assert (spec.head_dim, spec.max_position, spec.tie_word_embeddings) == (256, 131072, True)
    assert (spec.global_rope, spec.local_rope) == (RopeSpec(theta=1e6), RopeSpec(theta=1e4))
    assert (spec.query_pre_attn_scalar, spec.final_logit_softcapping) == (256.0, None)
    assert [(s.kind, s.layers) for s in spec.layer_specs(16, "bf16")] == [("sliding", 5), ("full", 1), ("sliding", 2)]


def test_rope_of_both_transformers_generations() -> None:
    old = parse(rope_theta=5e5, rope_local_base_freq=100.0, rope_scaling={"rope_type": "linear", "factor": 8.0})
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}
    new = parse(rope_parameters={"full_attention": full, "sliding_attention": {"rope_theta": 100.0}})
    assert old == new
    assert old.global_rope == RopeSpec(theta=5e5, kind="linear", factor=8.0) and old.local_rope.theta == 100.0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported; known: null"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ({"layer_types": ["full_attention"]}, "for each of the 8 layers"),
        ({"altup_num_inputs": 4}, "altup_num_inputs is 4: not a key"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(WeightsError) as caught:
        parse(**changes)
    assert any(text in problem for problem in caught.value.problems)


@pytest.mark.slow
def test_the_real_vocabulary() -> None:
    directory = gemma3_270m()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == json.loads((directory / "config.json").read_text())["vocab_size"] == 262144
    # Facts of the original.
    assert [tokenizer.token_to_id(t) for t in ("<pad>", "<eos>", "<bos>", "<start_of_turn>")] == [0, 1, 2, 105]
    for text in ("Hello, world!", "  two spaces\n\n\ttab", "naïve café — 東京 🎉", "def f(x):\n        return x"):
        ids = tokenizer.encode(text).ids
        assert ids[0] == 2
        assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("The capital of France is Paris.").ids) == 8
