"""What the GPU's benchmarks run: models, rows, and what stands beside them (../../docs/benchmarks.md)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

_QWEN3 = {
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        **_QWEN3,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
    },
    "qwen3-30b-a3b": {
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    # Experts in bfloat16, four times the bytes of the MXFP4 that it is published in.
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "eos_token_id": 200002,
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
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 201088,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "attention_bias": False,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "torch_dtype": "bfloat16",
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
}
# SmolLM2-135M's shape, for parity.
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    # Tied, a random model repeats its input.
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class Row:
    """One line of the table: `requests` prompts of `input_len` tokens at once, `output_len` tokens each."""

    name: str
    title: str
    requests: int
    input_len: int
    output_len: int
    unit: str
    """out tok/s, total tok/s or ms (time to the first token)."""
    known: dict[str, tuple[float, float | None, float]]
    """By model: the peer's recorded figure, the computed limit, our bar. Not of models that were never measured."""
    repeats: int = 2

    def value(self, seconds: float, output_len: int) -> float:
        """In the row's unit, of a run's `seconds`: to its first token where the unit is ms, else to its last."""
        if self.unit == "ms":
            return seconds * 1e3
        counted = output_len + (self.input_len if self.unit.startswith("total") else 0)
        return self.requests * counted / seconds

    def better(self, value: float, other: float) -> float:
        """How many times better `value` is than `other`."""
        return other / value if self.unit == "ms" else value / other


def _known(dense: tuple[float, float | None, float], moe: tuple[float, float | None, float]) -> dict[str, Any]:
    return {"qwen3-8b": dense, "qwen3-30b-a3b": moe}


ROWS = (
    Row("single", "single stream 128/256", 1, 128, 256, "out tok/s", _known((194, 265, 235), (230, 480, 350))),
    Row("ttft1k", "time to first token, 1024 in", 1, 1024, 1, "ms", _known((26.5, 22.5, 24), (59, None, 30)), 5),
    Row("ttft8k", "time to first token, 8192 in", 1, 8192, 1, "ms", _known((211, 198, 203), (155, 127, 140)), 3),
    Row(
        "prefill", "prefill 32 x 4096", 32, 4096, 1, "total tok/s",
        _known((41100, 44500, 43000), (64200, 85000, 72000)),
    ),
    Row(
        "decode", "256 x 128/512", 256, 128, 512, "out tok/s",
        _known((18270, 24400, 21500), (10990, 15000, 13000)),
    ),
    Row(
        "mixed", "512 x 1024/128", 512, 1024, 128, "total tok/s",
        _known((35000, 42500, 39000), (42600, 50000, 46000)),
    ),
    Row(
        "long", "64 x 8192/256", 64, 8192, 256, "total tok/s",
        _known((27300, 29000, 28300), (31900, 36500, 34000)), 1,
    ),
)  # fmt: skip
START = {"qwen3-8b": (76.0, 25.0), "qwen3-30b-a3b": (97.0, 40.0)}
"""Seconds from start to ready: the peer's recorded figure, our bar; not of models that were never measured."""
RECORDED_BY = "recorded of vLLM 0.24.0 on one H200 (runtime/bench/LOG.md)"
"""What the recorded figures are."""
WARM_UP = ((8, 128, 16), (256, 128, 8), (2, 4096, 2))
"""Requests, tokens in, tokens out of what runs before anything is timed."""


def prompts(rng: random.Random, count: int, length: int, model: str = "qwen3-8b") -> list[list[int]]:
    """Random ids within the model's vocabulary."""
    end = min(150000, MODELS[model]["vocab_size"])
    return [[rng.randrange(1000, end) for _ in range(length)] for _ in range(count)]


def shortened(row: Row, quick: bool) -> tuple[int, int]:
    """Tokens out and repeats."""
    return (min(row.output_len, 64), 1) if quick else (row.output_len, row.repeats)


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)
