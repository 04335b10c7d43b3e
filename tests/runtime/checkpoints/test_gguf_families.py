"""Each family's GGUF form is the model it was made from, by the names and shapes of llama.cpp's own converter."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.constants import MODEL_ARCH_NAMES
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from isthmus_runtime.checkpoints.gguf import import_gguf
from isthmus_runtime.errors import WeightsError
from isthmus_runtime.models.registry import read_model_spec

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

QUANTS = gguf.GGMLQuantizationType
Keys = dict[str, int | float]


def plain(name: str, weight: torch.Tensor, model: Any) -> torch.Tensor:
    del name, model
    return weight


def whole_norms(name: str, weight: torch.Tensor, model: Any) -> torch.Tensor:
    """Gemma's norms are differences from 1 in transformers alone."""
    del model
    return weight + 1 if name.endswith("norm.weight") else weight


def neighbours(name: str, weight: torch.Tensor, model: Any) -> torch.Tensor:
    """Llama's rotated channels are neighbours in llama.cpp, halves in transformers."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    heads = model.config.num_attention_heads if "q_proj" in name else model.config.num_key_value_heads
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def no_tensors(model: Any) -> dict[str, torch.Tensor]:
    del model
    return {}


def llama3_divisors(model: Any) -> dict[str, torch.Tensor]:
    default, _ = ROPE_INIT_FUNCTIONS["default"](model.config, torch.device("cpu"))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    return {"rope_freqs.weight": default / scaled}


def longrope_factors(model: Any) -> dict[str, torch.Tensor]:
    scaling = model.config.rope_scaling
    return {f"rope_factors_{kind}.weight": torch.tensor(scaling[f"{kind}_factor"]) for kind in ("short", "long")}


@dataclass(frozen=True)
class Form:
    """A family, a tiny configuration, and what the converter writes for it."""

    config: str
    arch: gguf.MODEL_ARCH
    options: dict[str, Any] = field(default_factory=dict)
    keys: Keys = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    written: Callable[[str, torch.Tensor, Any], torch.Tensor] = plain
    extra: Callable[[Any], dict[str, torch.Tensor]] = no_tensors


FORMS = {
    "llama-3.1": Form(
        "LlamaConfig",
        gguf.MODEL_ARCH.LLAMA,
        {
            "rope_theta": 500000.0,
            "max_position_embeddings": 131072,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        written=neighbours,
        extra=llama3_divisors,
    ),
    "qwen2-yarn": Form(
        "Qwen2Config",
        gguf.MODEL_ARCH.QWEN2,
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
        {"rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
        {"rope.scaling.type": "yarn"},
    ),
    "qwen3": Form("Qwen3Config", gguf.MODEL_ARCH.QWEN3, {"head_dim": 32}),
    "qwen3-moe": Form(
        "Qwen3MoeConfig",
        gguf.MODEL_ARCH.QWEN3MOE,
        {
            "head_dim": 32,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 32},
    ),
    "gemma2": Form(
        "Gemma2Config",
        gguf.MODEL_ARCH.GEMMA2,
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 7,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 9.0,
            "tie_word_embeddings": True,
        },
        {"attention.sliding_window": 7, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 9.0},
        written=whole_norms,
    ),
    "gemma3": Form(
        "Gemma3TextConfig",
        gguf.MODEL_ARCH.GEMMA3,
        {
            "num_hidden_layers": 7,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 5,
            "tie_word_embeddings": True,
        },
        {"attention.sliding_window": 5},
        written=whole_norms,
    ),
    "phi3-longrope": Form(
        "Phi3Config",
        gguf.MODEL_ARCH.PHI3,
        {
            "pad_token_id": 0,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0 + 0.1 * i for i in range(6)],
                "long_factor": [1.5 + 0.4 * i for i in range(6)],
            },
            "original_max_position_embeddings": 32,
            "max_position_embeddings": 128,
        },
        {"rope.dimension_count": 12, "rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.18},
        extra=longrope_factors,
    ),
    "phi3-window": Form(
        "Phi3Config", gguf.MODEL_ARCH.PHI3, {"pad_token_id": 0, "sliding_window": 9}, {"attention.sliding_window": 9}
    ),
}


def build(form: Form) -> Any:
    torch.manual_seed(1)
    options: dict[str, Any] = {
        "vocab_size": 259,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    config = getattr(transformers, form.config)(**{**options, **form.options})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # else all are alike, and one in the place of another would not show
                weight.add_(torch.randn_like(weight) * 0.2)
    return model


def write(form: Form, model: Any, path: Path, quant: gguf.GGMLQuantizationType | None = None) -> Path:
    config, arch = model.config, MODEL_ARCH_NAMES[form.arch]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    for key, value in form.keys.items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(f"{arch}.{key}", value)
    for key, text in form.texts.items():
        writer.add_string(f"{arch}.{key}", text)
    writer.add_tokenizer_model("llama")
    tokens = ["<pad>", "<eos>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [6] * 256)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_add_space_prefix(False)
    theirs = gguf.get_tensor_name_map(form.arch, config.num_hidden_layers)
    stacked: dict[str, list[torch.Tensor]] = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        # Experts are stacked under the name without their number.
        place = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        stacked.setdefault(place, []).append(form.written(name, weight, model))
    for name, weights in stacked.items():
        known = theirs.get_name(name, try_suffixes=(".weight", ".bias"))
        assert known is not None, name
        values = np.ascontiguousarray((torch.stack(weights) if len(weights) > 1 else weights[0]).numpy())
        if quant is not None and values.ndim > 1:
            writer.add_tensor(known, gguf.quantize(values, quant), raw_dtype=quant)
        else:
            writer.add_tensor(known, values)
    for name, weight in form.extra(model).items():
        writer.add_tensor(name, weight.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@torch.no_grad()
@pytest.mark.parametrize("name", FORMS)
def test_it_is_the_model_it_was_made_from(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    model, out = build(form), tmp_path / "out"
    import_gguf(write(form, model, tmp_path / "x.gguf"), out, print)
    found = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = torch.arange(40)[None] * 5
    torch.testing.assert_close(found(tokens).logits, model(tokens).logits, atol=1e-4, rtol=1e-4)
    spec: Any = read_model_spec(out)
    assert spec.num_layers == model.config.num_hidden_layers
    if name == "llama-3.1":
        assert (spec.rope.kind, spec.rope.factor) == ("llama3", 8.0)
    if name == "gemma3":
        assert spec.windows == (5, 5, 5, 5, 5, None, 5)


def test_stacked_experts_may_be_quantised(tmp_path: Path) -> None:
    form = FORMS["qwen3-moe"]
    model, out = build(form), tmp_path / "out"
    import_gguf(write(form, model, tmp_path / "x.gguf", QUANTS.Q8_0), out, print)
    found = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    weight = model.model.layers[1].mlp.experts[3].up_proj.weight.detach().numpy()
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(weight, QUANTS.Q8_0), QUANTS.Q8_0)).bfloat16().float()
    assert torch.equal(found.model.layers[1].mlp.experts[3].up_proj.weight, expected)


def test_experts_that_are_not_there_are_named(tmp_path: Path) -> None:
    form = FORMS["qwen3-moe"]
    fewer = Form(form.config, form.arch, form.options, {**form.keys, "expert_count": 4})
    with pytest.raises(
        WeightsError, match=r"blk\.0\.ffn_gate_exps\.weight has shape \[5, 32, 64\], expected \[4, 32, 64\]"
    ):
        import_gguf(write(fewer, build(form), tmp_path / "x.gguf"), tmp_path / "out", print)


# What files in the wild hold, and how many numbers a block of each has.
TYPES = sorted(
    (kind for kind in QUANTS if kind in gguf.GGML_QUANT_SIZES and kind.name[0] in "QIBTM" and kind.name[1:2] != "8_"),
    key=lambda kind: kind.name,
)


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind.name not in ("I8", "I16", "I32", "I64")], ids=str)
def test_every_quantisation_is_read(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    """Random bits of each type become what the gguf package says they are, in bf16; what it cannot read is named."""
    count, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(3)
    form = Form("Qwen3Config", gguf.MODEL_ARCH.QWEN3, {"head_dim": 64, "hidden_size": 256, "intermediate_size": 256})
    model = build(form)
    raw = generator.integers(0, 60, (256, 256 // count * size), dtype=np.uint8)
    path, out = tmp_path / "x.gguf", tmp_path / "out"
    write(form, model, path)
    writer = gguf.GGUFWriter(tmp_path / "y.gguf", "qwen3")
    reader = gguf.GGUFReader(path)
    for part in reader.fields.values():
        if not part.name.startswith("GGUF.") and part.name != "general.architecture":
            writer.add_key_value(
                part.name, part.contents(), part.types[0], part.types[-1] if len(part.types) > 1 else None
            )
    for tensor in reader.tensors:
        if tensor.name == "blk.1.ffn_up.weight":
            writer.add_tensor(tensor.name, raw, raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    try:
        expected = torch.from_numpy(np.ascontiguousarray(gguf.dequantize(raw, kind))).bfloat16()
    except NotImplementedError:
        with pytest.raises(WeightsError, match=rf"blk\.1\.ffn_up\.weight has type {kind.name}, which cannot be read"):
            import_gguf(tmp_path / "y.gguf", out, print)
        return
    import_gguf(tmp_path / "y.gguf", out, print)
    from safetensors.torch import load_file

    found = load_file(out / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(found.nan_to_num(), expected.reshape(256, 256).nan_to_num())
