"""Random models of odd dimensions, by transformers, which tests compare with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

DEEPSEEK = {
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
}


@dataclass(frozen=True)
class Tiny:
    """A random model of odd dimensions, and how to serve it."""

    config: str
    overrides: dict[str, Any] = field(default_factory=dict)
    heads: int = 4
    kv_heads: int = 2
    block_size: int = 16
    budget: int = 64
    layout: str = "block-major"


def build(case: Tiny, directory: Path, scale: float = 0.4) -> Any:
    """Save a random model to `directory`; the transformers model. `scale`: of its weights."""
    import transformers

    options: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 72,
        "intermediate_size": 76,
        "num_hidden_layers": 3,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.kv_heads,
        "max_position_embeddings": 256,
        # Wide weights: a narrow random model repeats one token, which proves little.
        "initializer_range": scale,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    config = getattr(transformers, case.config)(**{**options, **case.overrides})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.add_(torch.randn_like(weight) * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(torch.rand_like(buffer) * 0.3)
    model.save_pretrained(directory, safe_serialization=True)
    return model
