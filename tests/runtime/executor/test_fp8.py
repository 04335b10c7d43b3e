"""Models whose matrices are 8-bit floats, on a CPU that computes their definition as if it were a GPU that can."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from isthmus_kernels import dispatch_weights
from isthmus_runtime.checkpoints.fp8 import Fp8Weights
from isthmus_runtime.checkpoints.quantized import Expanded, scheme_of
from isthmus_runtime.checkpoints.random import RandomTensors
from isthmus_runtime.checkpoints.safetensors import Checkpoint
from isthmus_runtime.config import ModelConfig
from isthmus_runtime.errors import ConfigError
from isthmus_runtime.executor.device.cpu import CpuDevice
from isthmus_runtime.executor.loading import load
from isthmus_runtime.models.base import TensorSource
from isthmus_runtime.models.registry import read_model_spec
from isthmus_runtime.models.shard import Slice

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
MIXTURE = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


class Able(CpuDevice):
    """A processor that says it multiplies 8-bit floats."""

    multiplies_fp8 = True


def fp8_checkpoint(folder: Path, kind: str) -> None:
    """A small Llama whose projections are stored in fp8, with a scale for each row, tensor or block."""
    settings: dict[str, Any] = {"quant_method": "fp8"}
    if kind == "block":
        settings["weight_block_size"] = [16, 32]
    (folder / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": settings}))
    shapes = read_model_spec(folder).tensor_shapes()
    source = RandomTensors(shapes, device=torch.device("cpu"), dtype=torch.bfloat16, seed=1)
    torch.manual_seed(3)
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        weight = source.take(name)
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
            continue
        sizes = {"row": (shape[0], 1), "tensor": (1,), "block": (-(-shape[0] // 16), -(-shape[1] // 32))}
        tensors[name] = (weight * 100).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = (torch.rand(sizes[kind]) + 0.5) / 100
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("kind", ["row", "tensor"])
def test_what_a_checkpoint_holds_is_what_is_multiplied(kind: str, tmp_path: Path) -> None:
    fp8_checkpoint(tmp_path, kind)
    spec = read_model_spec(tmp_path)
    shapes, scheme = spec.tensor_shapes(), scheme_of(spec.quantization)
    assert scheme is not None
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in ("q", "k", "v")]
    with Checkpoint(tmp_path, shapes, scheme=scheme) as checkpoint:
        expanded = Expanded(checkpoint, scheme, shapes, checkpoint.parts)
        weights = Fp8Weights(expanded, None)
        weight, scale = weights.scaled(*names) or pytest.fail("expanded")
        assert torch.equal(weight.view(torch.uint8), checkpoint.take(*names).view(torch.uint8))
        assert scale.shape == weight.shape[:1]
        assert torch.equal((weight.float() * scale[:, None]).bfloat16(), expanded.take(*names))
        assert weights.scaled("lm_head.weight") is None
        for dim, whole in ((0, scale[8:24]), (1, scale[:64])):
            own, part = weights.scaled(Slice(names[0], dim, 8, 24)) or pytest.fail("expanded")
            assert torch.equal(own.view(torch.uint8), weight[:64].narrow(dim, 8, 16).view(torch.uint8))
            assert torch.equal(part, whole)
    assert (weights.kept, weights.rounded, weights.left) == (5, 0, 1)


def test_scales_of_blocks_are_expanded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fp8_checkpoint(tmp_path, "block")
    with caplog.at_level(logging.WARNING):
        loaded = load(ModelConfig(path=str(tmp_path), dtype="bfloat16"), device=Able(2))
    assert "weights are expanded to bfloat16 at load" in caplog.text
    assert loaded.kv_variants == ()


@pytest.mark.parametrize("quantization", ["auto", "fp8", "none"])
def test_an_engine_over_an_fp8_checkpoint(
    quantization: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, start_engine: Callable[..., Any], job: Any
) -> None:
    fp8_checkpoint(tmp_path, "row")
    config = ModelConfig(path=str(tmp_path), dtype="bfloat16", quantization=quantization)
    with caplog.at_level(logging.INFO):
        loaded = load(config, device=Able(2))
    eight = quantization != "none"
    assert ("8-bit floats: 14 matrices as they are stored, 0 rounded at load, 0 left" in caplog.text) == eight
    assert ("weights are expanded" in caplog.text) != eight
    # Engines whose keys come of other arithmetic do not exchange KV.
    assert loaded.kv_variants == (("weights:fp8",) if eight else ())
    plain = load(ModelConfig(path=str(tmp_path), dtype="bfloat16"), device=CpuDevice(2))
    assert (loaded.model.weight_bytes < plain.model.weight_bytes) == eight
    prompts = [[(7 * i + k) % 97 for i in range(20 + k)] for k in range(3)]
    start = {"device": Able(2), "dtype": "bfloat16", "quantization": quantization}
    got = start_engine(tmp_path, **start).driver(seed=3).run([job(p, 8) for p in prompts])
    assert all(len(tokens) == 8 for tokens in got)


def random_mixture(folder: Path) -> Callable[..., TensorSource]:
    (folder / "config.json").write_text(json.dumps(MIXTURE))

    def source(spec: Any, device: torch.device) -> TensorSource:
        return RandomTensors(spec.tensor_shapes(), device=device, dtype=torch.bfloat16, seed=5)

    return source


def test_a_mixture_is_rounded_but_for_its_router(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = ModelConfig(path=str(tmp_path), dtype="bfloat16", quantization="fp8")
    with caplog.at_level(logging.INFO):
        loaded = load(config, device=Able(2), source=random_mixture(tmp_path))
    # A layer: q, k, v, o, and three of each of eight experts.
    assert "0 matrices as they are stored, 56 rounded at load, 0 left" in caplog.text
    layer = loaded.model._layers[0]  # type: ignore[attr-defined]
    assert layer.mlp.router._packed.weight_dtype == torch.bfloat16
    source = random_mixture(tmp_path)(loaded.spec, torch.device("cpu"))
    third = "model.layers.0.mlp.experts.3.down_proj.weight"
    weight, scale = dispatch_weights.quantize(source.take(third))
    assert torch.equal(layer.mlp.weights.down[3].view(torch.uint8), weight.view(torch.uint8))
    assert torch.equal(layer.mlp.weights.down_scale[3], scale)


def test_a_side_that_does_not_fit_stays(tmp_path: Path) -> None:
    source = RandomTensors({"a": (48, 24), "b": (48, 32)}, device=torch.device("cpu"), dtype=torch.bfloat16, seed=1)
    weights = Fp8Weights(source, dispatch_weights.quantize)
    assert weights.scaled("a") is None
    assert weights.scaled("b") is not None
    assert (weights.rounded, weights.left) == (1, 1)


@pytest.mark.parametrize(("device", "dtype", "named"), [
    (CpuDevice, "bfloat16", ["cpu has no products of 8-bit floats"]),
    (Able, "float32", ["--dtype float32"]),
    (CpuDevice, "float32", ["cpu has no products of 8-bit floats", "--dtype float32"]),
])  # fmt: skip
def test_what_cannot_multiply_refuses(device: type[CpuDevice], dtype: str, named: list[str], tmp_path: Path) -> None:
    config = ModelConfig(path=str(tmp_path), dtype=dtype, quantization="fp8")
    with pytest.raises(ConfigError) as refused:
        load(config, device=device(2), source=random_mixture(tmp_path))
    assert all(part in str(refused.value) for part in ["--quantization fp8", *named])
