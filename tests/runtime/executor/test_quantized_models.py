"""Quantised checkpoints give the tokens of the model whose weights they stand for.

Each way of storing is written here as its format says, from whole numbers or small floats that are known; the model
they stand for is computed from those numbers by hand, and run by transformers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from isthmus_runtime.config import ModelConfig
from isthmus_runtime.errors import WeightsError
from isthmus_runtime.executor.device.cpu import CpuDevice
from isthmus_runtime.executor.loading import load

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

GROUP = 16
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
Made = tuple[dict[str, Tensor], Tensor]
"""What is stored, by the end of its name, and the weight that it stands for."""


def pack(numbers: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """Whole numbers [N, M] to int32 [N, M * bits / 32]; `order`: which number comes first, second, ..."""
    each = 32 // bits
    packed = torch.zeros(numbers.shape[0], numbers.shape[1] // each, dtype=torch.int64)
    for place, source in enumerate(order or range(each)):
        packed |= numbers[:, source::each].long() << (bits * place)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def fp8(weight: Tensor, kind: str) -> Made:
    rows, columns = weight.shape
    stored = (weight * 20).to(torch.float8_e4m3fn)
    if kind == "block":
        scale = torch.rand(-(-rows // 24), -(-columns // 40)) / 20 + 0.01
        full = torch.stack([torch.stack([scale[r // 24, c // 40] for c in range(columns)]) for r in range(rows)])
        return {"weight": stored, "weight_scale_inv": scale}, stored.float() * full
    if kind == "row":
        scale = (torch.rand(rows, 1) / 20 + 0.01).bfloat16()
        return {"weight": stored, "weight_scale": scale}, stored.float() * scale.float()
    return {"weight": stored, "weight_scale": torch.tensor(0.05)}, stored.float() * 0.05


def grouped(weight: Tensor, kind: str) -> Made:
    bits = 8 if kind == "gptq-v2" else 4
    rows, columns = weight.shape
    groups, each = columns // GROUP, 32 // bits
    numbers = torch.randint(0, 1 << bits, (columns, rows))
    zeros = torch.randint(1, 1 << bits, (groups, rows))
    scales = (torch.rand(groups, rows) * 0.5 / (1 << bits) + 0.01).half()
    # Inputs in any order, as activation order leaves them.
    group = torch.arange(columns) // GROUP
    if kind == "gptq-v2":
        group = group[torch.randperm(columns)]
    full = ((numbers - zeros[group]).float() * scales.float()[group]).T
    if kind == "awq":
        stored = {"qweight": pack(numbers, 4, AWQ_ORDER), "qzeros": pack(zeros, 4, AWQ_ORDER)}
    else:
        held = zeros if kind == "gptq-v2" else zeros - 1
        stored = {"qweight": pack(numbers.T, bits).T.contiguous(), "qzeros": pack(held, bits), "g_idx": group.int()}
    assert stored["qweight"].shape == ((columns, rows // each) if kind == "awq" else (columns // each, rows))
    return {**stored, "scales": scales}, full


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            "output_activations": None,
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}
METHODS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Made]]] = {
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, lambda w: fp8(w, "tensor")),
    "fp8-row": (COMPRESSED, lambda w: fp8(w, "row")),
    "fp8-block": ({"quant_method": "fp8", "weight_block_size": [24, 40]}, lambda w: fp8(w, "block")),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
        lambda w: grouped(w, "awq"),
    ),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}, lambda w: grouped(w, "gptq")),
    "gptq-v2": (
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": True, "checkpoint_format": "gptq_v2"},
        lambda w: grouped(w, "gptq-v2"),
    ),
}


def write(folder: Path, model: Any, tensors: dict[str, Tensor], settings: dict[str, Any]) -> None:
    """`model`'s directory, with `tensors` for its weights."""
    model.save_pretrained(folder)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def expected_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
    )
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


@torch.no_grad()
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in {"fp8-block", "gptq"} else pytest.mark.slow) for name in METHODS]
)
def test_tokens_equal_the_model_it_stands_for(
    name: str,
    tmp_path: Path,
    start_engine: Callable[..., Any],
    job: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings, quantise = METHODS[name]
    model, tensors = llama(), dict[str, Tensor]()
    for key, weight in model.state_dict().items():
        if not key.endswith("_proj.weight"):
            tensors[key] = weight.clone()
            continue
        parts, full = quantise(weight)
        tensors |= {f"{key.removesuffix('weight')}{end}": part for end, part in parts.items()}
        weight.copy_(full.bfloat16().float())
    if name == "fp8-tensor":
        # Of activations, which stay as they are.
        tensors["model.layers.0.self_attn.q_proj.input_scale"] = torch.tensor(0.3)
    write(tmp_path, model, tensors, settings)
    with caplog.at_level(logging.WARNING):
        engine = start_engine(tmp_path)
    assert "weights are expanded to bfloat16 at load" in caplog.text
    prompts = [[(7 * i + k) % 97 for i in range(20 + k)] for k in range(3)]
    got = engine.driver(seed=3).run([job(p, 8) for p in prompts])
    assert got == [expected_tokens(model, p, 8) for p in prompts]


class Able(CpuDevice):
    """A processor that says it multiplies experts of 4-bit floats: it does so by their definition."""

    multiplies_mxfp4 = True


def gpt_oss(folder: Path, *, scales: tuple[int, int] = (-4, 0)) -> Any:
    """A small one with experts of 4-bit floats, in `folder`, and the model that they stand for."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.4,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    tensors, values = dict[str, Tensor](), torch.tensor(FP4)
    for key, weight in model.state_dict().items():
        if not key.endswith(("gate_up_proj", "down_proj")):
            tensors[key] = weight.clone()
            continue
        experts, inputs, outputs = weight.shape
        codes = torch.randint(0, 16, (experts, outputs, inputs // 32, 32))
        powers = torch.randint(*scales, (experts, outputs, inputs // 32))
        tensors[f"{key}_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
        tensors[f"{key}_scales"] = (powers + 127).to(torch.uint8)
        weight.copy_((values[codes] * 2.0 ** powers[..., None]).flatten(2).transpose(1, 2))
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    write(folder, model, tensors, settings)
    return model


@torch.no_grad()
def test_mxfp4_experts(tmp_path: Path, start_engine: Callable[..., Any], job: Any) -> None:
    model = gpt_oss(tmp_path)
    prompts = [[(7 * i + k) % 97 for i in range(20 + k)] for k in range(3)]
    got = start_engine(tmp_path).driver(seed=3).run([job(p, 8) for p in prompts])
    assert got == [expected_tokens(model, p, 8) for p in prompts]


@torch.no_grad()
@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_mxfp4_experts_are_kept_where_the_device_multiplies_them(
    quantization: str,
    tmp_path: Path,
    start_engine: Callable[..., Any],
    job: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpt_oss(tmp_path)
    kept = quantization == "auto"
    with caplog.at_level(logging.INFO):
        config = ModelConfig(path=str(tmp_path), dtype="bfloat16", quantization=quantization)
        loaded = load(config, device=Able(2))
    assert ("4-bit floats: experts' matrices of 2 layers as they are stored, of 0 left" in caplog.text) == kept
    assert ("weights are expanded to bfloat16 at load" in caplog.text) != kept
    # The numbers are those of expanded weights: keys are the same but for the order of additions.
    assert loaded.kv_variants == load(replace(config, quantization="none"), device=CpuDevice(2)).kv_variants
    experts = loaded.model._layers[1].mlp.weights  # type: ignore[attr-defined]
    assert (experts.gate_up.dtype == torch.uint8) == kept
    # Half a byte and a thirty-second for each of 128 columns, of which 64 and 32 are filled.
    assert not kept or experts.nbytes == 4 * (64 + 64) * 68
    prompts = [[(7 * i + k) % 97 for i in range(20 + k)] for k in range(3)]
    engines = [
        start_engine(tmp_path, device=Able(2), dtype="bfloat16", quantization=quantization),
        start_engine(tmp_path, device=CpuDevice(2), dtype="bfloat16"),
    ]
    got, want = (engine.driver(seed=3).run([job(p, 8) for p in prompts]) for engine in engines)
    assert got == want


def test_a_scale_beyond_what_kernels_take_is_expanded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gpt_oss(tmp_path, scales=(1, 3))
    with caplog.at_level(logging.INFO):
        loaded = load(ModelConfig(path=str(tmp_path), dtype="bfloat16"), device=Able(2))
    assert "4-bit floats: experts' matrices of 0 layers as they are stored, of 2 left in torch.bfloat16" in caplog.text
    assert "weights are expanded to bfloat16 at load" in caplog.text
    assert loaded.model._layers[0].mlp.weights.gate_up.dtype == torch.bfloat16  # type: ignore[attr-defined]


def test_a_wrong_part_is_named(tmp_path: Path) -> None:
    model = llama()
    settings, quantise = METHODS["gptq"]
    tensors = {}
    for key, weight in model.state_dict().items():
        parts, _ = quantise(weight) if key.endswith("_proj.weight") else ({"weight": weight}, weight)
        tensors |= {f"{key.removesuffix('weight')}{end}": part for end, part in parts.items()}
    name = "model.layers.0.mlp.up_proj"
    tensors[f"{name}.qzeros"] = tensors[f"{name}.qzeros"][:1]
    tensors[f"{name}.scales"] = tensors[f"{name}.scales"].int()
    write(tmp_path, model, tensors, settings)
    with pytest.raises(WeightsError) as caught:
        load(ModelConfig(path=str(tmp_path), device="cpu"))
    problems = "\n".join(caught.value.problems)
    assert f"tensor {name}.qzeros has shape [1, 12], config.json asks for [4, 12]" in problems
    assert f"tensor {name}.scales has dtype I32; supported: F32, F16, BF16" in problems


def test_what_a_tensor_holds_must_be_said(tmp_path: Path) -> None:
    """fp8 weights without a quantization_config are no weights."""
    model = llama()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"lm_head\.weight has dtype F8_E4M3; supported: F32"):
        load(ModelConfig(path=str(tmp_path), device="cpu"))
