"""Gemma 3: its configuration, its GGUF form, and a real one against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from real_models import gemma3_270m
from tokenizers import Tokenizer

from isthmus_runtime.checkpoints.gguf import import_gguf
from isthmus_runtime.errors import WeightsError
from isthmus_runtime.layers.rope_spec import RopeSpec
from isthmus_runtime.models.registry import parse_model_spec, read_model_spec

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


NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model: Any, path: Path) -> Path:
    """As llama.cpp's converter does: its names, one added to every norm."""
    config = model.config
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_sliding_window(config.sliding_window)
    writer.add_tokenizer_model("llama")
    tokens = ["<pad>", "<eos>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [6] * 256)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_add_space_prefix(False)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        stem, _, kind = name.removeprefix("model.").rpartition(".")
        if stem.startswith("layers."):
            _, number, part = stem.split(".", 2)
            stem = f"blk.{number}.{NAMES[part]}"
        else:
            stem = {"embed_tokens": "token_embd", "norm": "output_norm"}[stem]
        values = weight + 1 if name.endswith("norm.weight") else weight
        writer.add_tensor(f"{stem}.{kind}", np.ascontiguousarray(values.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@torch.no_grad()
def test_gguf_is_the_model_it_was_made_from(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(1)
    config = transformers.Gemma3TextConfig(
        vocab_size=259,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=5,
        initializer_range=0.3,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.add_(torch.randn_like(weight) * 0.2)
    out = tmp_path / "out"
    import_gguf(write_gguf(model, tmp_path / "x.gguf"), out, print)
    found = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tokens = torch.arange(40)[None] * 5
    torch.testing.assert_close(found(tokens).logits, model(tokens).logits)
    assert read_model_spec(out).windows == (5, 5, 5, 5, 5, None, 5)


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
