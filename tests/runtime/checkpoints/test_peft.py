"""Adapters in PEFT's format: what is read, and what is refused by which words."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_adapters import save_adapter
from safetensors.torch import load_file, save_file

from isthmus_runtime.checkpoints import peft
from isthmus_runtime.checkpoints.peft import parse_adapter, read_files
from isthmus_runtime.errors import WeightsError

LAYER = "model.layers.0"
SHAPES = {
    "model.embed_tokens.weight": (97, 64),
    f"{LAYER}.self_attn.q_proj.weight": (48, 64),
    f"{LAYER}.self_attn.o_proj.weight": (64, 48),
    f"{LAYER}.mlp.gate_proj.weight": (80, 64),
    "lm_head.weight": (97, 64),
}
ADAPTABLE = tuple(name.removesuffix(".weight") for name in SHAPES if name.startswith(LAYER))
QUERY = f"{LAYER}.self_attn.q_proj"


def read(folder: Path, max_rank: int = 8) -> Any:
    return parse_adapter(read_files(folder, SHAPES, ADAPTABLE, max_rank), SHAPES, ADAPTABLE, max_rank)


def problems(folder: Path, max_rank: int = 8) -> str:
    with pytest.raises(WeightsError) as error:
        read(folder, max_rank)
    return "\n".join(error.value.problems)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("config", [{}, {"use_rslora": True}])
def test_what_it_adds(tmp_path: Path, dtype: torch.dtype, config: dict[str, Any]) -> None:
    added = save_adapter(tmp_path, SHAPES, seed=1, rank=4, alpha=12, dtype=dtype, **config)
    found = read(tmp_path)
    assert {f"{module}.weight" for module in found.modules} == set(added) and len(added) == 3
    for module, pair in found.modules.items():
        delta = pair.scale * pair.b.float() @ pair.a.float()
        torch.testing.assert_close(delta, added[f"{module}.weight"])


def test_patterns_of_rank_and_alpha(tmp_path: Path) -> None:
    save_adapter(tmp_path, SHAPES, seed=1, rank=4, alpha=8, rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 3})
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    for part, cut in (("A", slice(2)), ("B", (slice(None), slice(2)))):
        name = f"base_model.model.{QUERY}.lora_{part}.weight"
        tensors[name] = tensors[name][cut].contiguous()
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    scales = {module.rsplit(".", 1)[-1]: pair.scale for module, pair in read(tmp_path).modules.items()}
    assert scales == {"q_proj": 1.5, "o_proj": 2.0, "gate_proj": 2.0}


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    for folder, seed, alpha in (("a", 1, 8), ("same", 1, 8), ("weights", 2, 8), ("settings", 1, 9)):
        save_adapter(tmp_path / folder, SHAPES, seed=seed, alpha=alpha)
    a, same, weights, settings = (read(tmp_path / f).digest for f in ("a", "same", "weights", "settings"))
    assert a == same and len({a, weights, settings}) == 3


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only LORA"),
        ({"use_dora": True}, "use_dora is set: weight-decomposed adapters (DoRA)"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is set"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is set"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"alpha_pattern": {"(a+)+": 1}}, "not regular expressions"),
        ({"alpha_pattern": {"q_proj": 0}}, "to numbers above 0"),
        ({"a_new_feature": 3}, "'a_new_feature' is 3, and its meaning is not known here"),
    ],
)
def test_settings_that_are_not_implemented_are_named(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    save_adapter(tmp_path, SHAPES, seed=1)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    assert said in problems(tmp_path)


def test_all_problems_of_the_matrices_at_once(tmp_path: Path) -> None:
    save_adapter(tmp_path, SHAPES, seed=1, rank=4)
    path = tmp_path / "adapter_model.safetensors"
    start = "base_model.model."
    tensors = load_file(path)
    tensors[f"{start}{QUERY}.lora_A.weight"] = torch.zeros(4, 63)
    del tensors[f"{start}{LAYER}.self_attn.o_proj.lora_B.weight"]
    tensors[f"{start}lm_head.lora_A.weight"] = torch.zeros(4, 64)
    tensors[f"{start}{LAYER}.mlp.other.lora_A.weight"] = torch.zeros(4, 64)
    tensors[f"{start}{LAYER}.mlp.gate_proj.lora_magnitude_vector"] = torch.zeros(80)
    tensors[f"{start}{LAYER}.mlp.gate_proj.lora_A.weight"] = torch.zeros(16, 64)
    tensors[f"{start}{LAYER}.mlp.gate_proj.lora_B.weight"] = torch.zeros(80, 16)
    save_file(tensors, path)
    said = problems(tmp_path)
    assert f"{QUERY} has A [4, 63] and B [48, 4], but the model's weight is [48, 64]" in said
    assert f"{LAYER}.self_attn.o_proj has only its matrix A" in said
    assert "adapters of lm_head are not implemented for this model" in said
    assert f"{LAYER}.mlp.other is not a module of this model" in said
    assert "lora_magnitude_vector is no matrix A or B" in said
    assert f"{LAYER}.mlp.gate_proj has rank 16, and --max-lora-rank is 8; raise it" in said


def test_a_matrix_that_is_there_twice_is_named(tmp_path: Path) -> None:
    """PEFT saves without the adapter's name; which of both was meant, nobody knows."""
    save_adapter(tmp_path, SHAPES, seed=1)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    name = f"base_model.model.{QUERY}.lora_A"
    save_file({**tensors, f"{name}.default.weight": tensors[f"{name}.weight"] + 1}, path)
    assert f"matrix A of {QUERY} is there twice, with and without .default; keep one" in problems(tmp_path)


def test_files_that_are_no_adapter(tmp_path: Path) -> None:
    assert "adapter_config.json is missing" in problems(tmp_path)
    save_adapter(tmp_path, SHAPES, seed=1)
    weights, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    assert "is not a complete safetensors file" in problems(tmp_path)
    weights.unlink()
    assert "adapter_model.safetensors is missing" in problems(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    assert "a pickle, which is not loaded" in problems(tmp_path)
    save_file({}, weights)
    assert "holds no matrices of an adapter" in problems(tmp_path)
    for text, said in (("[]", "holds list"), ("{", "cannot be read as JSON")):
        config.write_text(text)
        assert said in problems(tmp_path)
    for text in ("[" * 100_000, '{"peft_type": "LORA", "\\ud800": 1}'):
        config.write_text(text)
        problems(tmp_path).encode()
    config.write_bytes(b" " * (2 << 20))
    assert "has more than the 1048576 bytes" in problems(tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    save_adapter(tmp_path, SHAPES, seed=1)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    assert f"{name} is no regular file" in problems(tmp_path)


def test_a_type_of_tensor_that_torch_does_not_have(tmp_path: Path) -> None:
    save_adapter(tmp_path, SHAPES, seed=1)
    header = json.dumps({"x": {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    assert "a tensor of type 'F8_E8M0', which no adapter has" in problems(tmp_path)


def test_a_header_of_more_tensors_than_an_adapter_has_is_not_read(tmp_path: Path) -> None:
    """The library reads one of 300,000 for minutes, and no thread of the process runs meanwhile."""
    save_adapter(tmp_path, SHAPES, seed=1)
    tensor = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"base_model.model.x{i}.lora_A.weight": tensor for i in range(800)}).encode()
    (tmp_path / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert f"its header has {len(header)} bytes; that of an adapter has at most 68608" in problems(tmp_path)


def test_what_is_told_of_a_file_is_bounded(tmp_path: Path) -> None:
    """A client that asks for an adapter, and the log, get eight problems and no name of a megabyte."""
    save_adapter(tmp_path, SHAPES, seed=1)
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **{f"k{i}" + "x" * 10_000: 1 for i in range(20)}}))
    told = problems(tmp_path)
    assert "... and 12 more" in told and len(told) < 8 * (300 + len(str(path)))
    path.write_text(json.dumps({**config, "lora_alpha": "9" * 100_000}))
    assert len(problems(tmp_path)) < 300 + len(str(path))


@pytest.mark.parametrize("changed", ["adapter_config.json", "adapter_model.safetensors"])
def test_files_that_change_while_they_are_read_are_no_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """The settings of one and the matrices of another would be an adapter that nobody trained."""
    save_adapter(tmp_path, SHAPES, seed=1)
    save_adapter(tmp_path / "new", SHAPES, seed=2, alpha=9)
    real = peft._bytes

    def read(path: Path, most: int) -> bytes:
        found = real(path, most)
        if path.name == peft.WEIGHTS:
            (tmp_path / "new" / peft.CONFIG).replace(tmp_path / peft.CONFIG)
        return found

    def fstat(fd: int, stat: Callable[[int], os.stat_result] = os.fstat) -> os.stat_result:
        found = stat(fd)
        if os.readlink(f"/proc/self/fd/{fd}").endswith(peft.WEIGHTS) and (tmp_path / "new" / peft.WEIGHTS).exists():
            (tmp_path / "new" / peft.WEIGHTS).replace(tmp_path / peft.WEIGHTS)
        return found

    if changed == peft.CONFIG:
        monkeypatch.setattr(peft, "_bytes", read)
    else:
        monkeypatch.setattr(peft.os, "fstat", fstat)
    with pytest.raises(WeightsError, match="was changed while it was read; load it again"):
        peft.read_files(tmp_path, SHAPES, ADAPTABLE, 64)
