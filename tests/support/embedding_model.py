"""Embedding models as sentence-transformers saves them, and a small random one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from processes import MODEL
from tokenizers import Tokenizer

HIDDEN = 48
"""Length of its vectors."""


def write_pooling(directory: Path, pooling: dict[str, Any], *, normalize: bool = True) -> None:
    """The files beside a model that say how its states become a vector. `pooling`: what its pooling module's has."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [{"idx": i, "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def write_embedding_model(directory: Path) -> Any:
    """A random Qwen3 with SmolLM2's tokenizer, pooled at the last token; returns transformers' model (fp32)."""
    import transformers

    torch.manual_seed(0)
    model = transformers.Qwen3Model(
        transformers.Qwen3Config(
            vocab_size=Tokenizer.from_file(str(MODEL / "tokenizer.json")).get_vocab_size(),
            hidden_size=HIDDEN,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            initializer_range=0.3,
            tie_word_embeddings=True,
            attn_implementation="eager",
        )
    ).eval()
    model.save_pretrained(directory, safe_serialization=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, directory)
    write_pooling(directory, {"pooling_mode_lasttoken": True})
    return model
