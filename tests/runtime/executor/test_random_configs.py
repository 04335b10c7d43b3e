"""Random configurations of all families give transformers' log-probabilities: windows, rotary embeddings, experts.

A part of a config.json that is taken and not computed shows here. What differs by intention is left out: longrope's
own length within `rope_scaling` is transformers 5's, and `mscale_all_dim` of DeepSeek V2 transformers has not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import DEEPSEEK, Tiny, build

from isthmus_runtime.request import SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Gemma2", "Gemma3Text", "Phi3", "GptOss", "DeepseekV2"]
FAMILIES += ["DeepseekV3"]
HEAD_DIM_OF_ITS_OWN = {"Llama", "Mistral", "Qwen3", "Qwen3Moe", "Gemma2", "Gemma3Text", "GptOss"}


def rope(r: random.Random) -> dict[str, Any] | None:
    kind = r.choice([None, None, "linear", "dynamic", "llama3", "yarn", "yarn"])
    if kind is None:
        return None
    made: dict[str, Any] = {"rope_type": kind, "factor": r.choice([1.0, 2.0, 3.5, 8.0])}
    if kind == "llama3":
        made |= {"low_freq_factor": r.choice([1.0, 2.0]), "high_freq_factor": r.choice([3.0, 4.0])}
        made["original_max_position_embeddings"] = r.choice([32, 100])
    if kind == "yarn":
        some = {"original_max_position_embeddings": r.choice([16, 64]), "attention_factor": r.choice([0.7, 1.3])}
        some |= {"beta_fast": r.choice([16, 64]), "beta_slow": r.choice([1, 2]), "truncate": r.random() < 0.5}
        made |= {key: value for key, value in some.items() if r.random() < 0.4}
    return made


def case(r: random.Random, family: str) -> Tiny:
    def maybe() -> bool:
        return r.random() < 0.4

    kv_heads = r.choice([1, 2, 3])
    heads, head_dim = kv_heads * r.choice([1, 2, 4]), r.choice([8, 16, 24, 32])
    own: dict[str, Any] = {
        "rms_norm_eps": r.choice([1e-6, 1e-3]),
        "tie_word_embeddings": maybe(),
        "rope_theta": r.choice([500.0, 1e6]),
        "num_hidden_layers": r.choice([1, 2, 3, 5]),
        "max_position_embeddings": 512,
        "head_dim" if family in HEAD_DIM_OF_ITS_OWN else "hidden_size": head_dim,
    }
    if family not in HEAD_DIM_OF_ITS_OWN:
        own["hidden_size"] = head_dim * heads
    if family == "Llama":
        own |= {"attention_bias": maybe(), "mlp_bias": maybe()}
    if family in ("Mistral", "Phi3"):
        own["sliding_window"] = r.choice([None, 9, 17])
    if family == "Phi3":
        own |= {"pad_token_id": 0, "partial_rotary_factor": r.choice([0.5, 0.75, 1.0])}
    if family.startswith("Qwen"):
        own |= {
            "use_sliding_window": r.random() < 0.7,
            "sliding_window": r.choice([5, 11]),
            "max_window_layers": r.choice([0, 1, 28]),
        }
    if family == "Qwen3Moe":
        own |= {"num_experts": r.choice([4, 7]), "num_experts_per_tok": r.choice([1, 3]), "norm_topk_prob": maybe()}
        own |= {
            "moe_intermediate_size": 24,
            "mlp_only_layers": r.choice([[], [0]]),
            "decoder_sparse_step": r.choice([1, 2]),
        }
    if family == "GptOss":
        own |= {"num_local_experts": 4, "num_experts_per_tok": r.choice([1, 2]), "sliding_window": r.choice([5, 16])}
    if family.startswith("Gemma"):
        own |= {
            "query_pre_attn_scalar": r.choice([16, 256]),
            "sliding_window": r.choice([7, 11]),
            "attention_bias": maybe(),
        }
        own["final_logit_softcapping"] = r.choice([None, 5.0])
    if family == "Gemma2":
        own["attn_logit_softcapping"] = r.choice([None, 3.0])
    if family == "Gemma3Text":
        own |= {"rope_local_base_freq": 300.0, "layer_types": None}
    if family.startswith("Deepseek"):
        kv_heads = heads
        own |= {**DEEPSEEK, "q_lora_rank": r.choice([None, 40]), "first_k_dense_replace": r.choice([0, 1, 2])}
        own |= {"norm_topk_prob": family == "DeepseekV3" and maybe(), "routed_scaling_factor": r.choice([1.0, 1.7])}
        own |= {"topk_method": "group_limited_greedy"} if family == "DeepseekV2" else {"rope_interleave": maybe()}
    if family != "Phi3" and (scaling := rope(r)):  # Phi3's is longrope alone
        own["rope_scaling"] = scaling
    layout, block_size = r.choice(["block-major", "layer-major"]), r.choice([4, 5, 8, 16])
    return Tiny(f"{family}Config", own, heads=heads, kv_heads=kv_heads, block_size=block_size, layout=layout)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities(family: str, seed: int, tmp_path: Path, start_engine: Callable[..., Any], job: Any) -> None:
    made = case(random.Random(f"{family} {seed}"), family)
    print(made)
    model = build(made, tmp_path)
    engine = start_engine(tmp_path, block_size=made.block_size, budget=16, layout=made.layout)
    prompt = [(7 * i + seed) % 97 for i in range(40)]
    asked = job(prompt, 3, SamplingParams(max_tokens=1, temperature=0.0, logprobs=97))
    engine.driver(seed=seed).run([asked])
    logits = model(torch.tensor([[*prompt, *asked.generated]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    for entry, expected in zip(asked.logprobs, logits.log_softmax(-1), strict=True):
        found = torch.tensor([value for _, value in sorted(entry.top)])
        # Wide random weights multiply what float32 rounds; what is not computed differs by tenths.
        torch.testing.assert_close(found, expected, atol=5e-2, rtol=0)
