"""Adapters in PEFT's format for tests, and what they make of a model's weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def save_adapter(
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
    *,
    seed: int,
    rank: int = 4,
    alpha: float = 8,
    targets: Sequence[str] = ATTENTION + MLP,
    layers: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    size: float = 0.5,
    **config: Any,
) -> dict[str, Tensor]:
    """Write a random adapter of the modules of `shapes` that end with one of `targets`; what it adds to each weight.

    `size`: of what it adds, beside a weight of 1.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    added: dict[str, Tensor] = {}
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if not module.endswith(tuple(targets)) or (layers is not None and int(name.split(".")[2]) not in layers):
            continue
        a = torch.randn(rank, shape[1], generator=generator).to(dtype)
        b = (torch.randn(shape[0], rank, generator=generator) * size / (scale * rank**0.5)).to(dtype)
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
        added[name] = scale * b.float() @ a.float()
    known = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "a/model",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "bias": "none",
        "target_modules": sorted({target.rsplit(".", 1)[-1] for target in targets}),
        "inference_mode": True,
        "use_dora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(known | config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return added
