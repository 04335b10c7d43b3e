"""What a request is answered depends neither on what shares its steps nor on how its prompt is cut: to the last bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from isthmus_kernels import native
from isthmus_runtime.models.registry import read_model_spec
from isthmus_runtime.request import SamplingParams

pytestmark = pytest.mark.skipif(not native.available(), reason="promised of the compiled kernels alone")

BASE = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "odd heads": {"architectures": ["LlamaForCausalLM"], "head_dim": 20},
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": 40,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    },
    "windows": {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 1,
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 24},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "pad_token_id": 0},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
    },
    "deepseek v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_key_value_heads": 3,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 40,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
    },
    # More heads than the compiled attention takes at a time for one KV head.
    "deepseek v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 140,
        "num_attention_heads": 70,
        "num_key_value_heads": 70,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 13 * 2,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 40,
        "first_k_dense_replace": 1,
    },
}
LATENTS = ("deepseek v2", "deepseek v3")


def model_dir(folder: Path, name: str) -> Path:
    config = BASE | MODELS[name]
    if name in LATENTS:
        del config["head_dim"]
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    shapes = read_model_spec(folder).tensor_shapes()
    weights = {n: torch.randn(s, generator=generator) / s[-1] ** 0.5 for n, s in shapes.items()}
    save_file({n: w.bfloat16() for n, w in weights.items()}, folder / "model.safetensors")
    return folder


DTYPES = [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "float32"), ("float32", "fp8"), ("bfloat16", "fp8")]


def cases() -> list[Any]:
    """Every model with all data types; while editing, with one, and one model with all."""
    return [
        pytest.param(
            name, *dtypes, marks=[] if name == "llama" or dtypes == ("bfloat16", "auto") else [pytest.mark.slow]
        )
        for name in MODELS
        for dtypes in DTYPES
        if dtypes[1] != "fp8" or name not in LATENTS  # latents are not rounded
    ]


@pytest.mark.parametrize(("name", "dtype", "kv_dtype"), cases())
def test_alone_and_in_any_batch(
    name: str, dtype: str, kv_dtype: str, tmp_path: Path, start_engine: Callable[..., Any], job: Any
) -> None:
    directory = model_dir(tmp_path, name)

    def jobs() -> list[Any]:
        generator = torch.Generator().manual_seed(5)
        found = []
        for number, length in enumerate([1, 3, 64, 65, 130, 190, 17, 90]):
            prompt = torch.randint(0, BASE["vocab_size"], (length,), generator=generator).tolist()
            sampling = SamplingParams(max_tokens=1, temperature=number % 3 * 0.7, seed=number, logprobs=4)
            found.append(job(prompt, 12, sampling))
        return found

    options = {"max_model_len": 256, "dtype": dtype, "kv_dtype": kv_dtype}
    whole = start_engine(directory, max_rows=1, budget=256, **options)
    want = jobs()
    for one in want:
        whole.driver(0, preempt=0.0).run([one])
    for seed, budget in ((1, 256), (2, 19), (3, 64)):
        engine = start_engine(directory, max_rows=8, budget=budget, **options)
        got = jobs()
        engine.driver(seed).run(got)
        for one, alone in zip(got, want, strict=True):
            assert one.generated == alone.generated, f"seed {seed}"
            assert one.logprobs == alone.logprobs, f"seed {seed}"
