"""Model directories that must be refused, each with file, tensor, expected and found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from isthmus_runtime.checkpoints.safetensors import MAX_HEADER_BYTES, Checkpoint
from isthmus_runtime.errors import WeightsError

EXPECTED = {"a.weight": (3, 4), "b.weight": (2, 4)}


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.arange(8 + 4 * (shape[0] - 2)).reshape(shape).float() for name, shape in EXPECTED.items()}


def refused(folder: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        Checkpoint(folder, EXPECTED)
    return "\n".join(caught.value.problems)


def test_tensors_are_read_and_joined(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, EXPECTED) as checkpoint:
        assert torch.equal(checkpoint.take("b.weight"), tensors()["b.weight"])
        assert torch.equal(checkpoint.take("b.weight", "a.weight"), torch.cat([*tensors().values()][::-1]))


def test_a_header_that_is_larger_than_a_models_is_not_read(tmp_path: Path) -> None:
    """The library reads 100 MB of it while nothing else of the process runs."""
    header = b'{"__metadata__":{"a":"' + b"x" * (MAX_HEADER_BYTES) + b'"}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert f"its header has {len(header)} bytes; that of a model has at most {MAX_HEADER_BYTES}" in refused(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_kept_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({name: tensor.to(dtype) for name, tensor in tensors().items()}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, EXPECTED) as checkpoint:
        found = checkpoint.take("a.weight")
        assert found.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
        assert torch.equal(found.float(), tensors()["a.weight"])


def test_mixed_dtypes_join_in_float32(tmp_path: Path) -> None:
    mixed = {**tensors(), "a.weight": tensors()["a.weight"].bfloat16()}
    save_file(mixed, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, EXPECTED) as checkpoint:
        assert torch.equal(checkpoint.take("a.weight", "b.weight"), torch.cat([*tensors().values()]))


def test_shards_are_joined_by_their_index(tmp_path: Path) -> None:
    parts = {"a.weight": "model-00001.safetensors", "b.weight": "model-00002.safetensors"}
    for name, file in parts.items():
        save_file({name: tensors()[name]}, tmp_path / file)
    assert "no model.safetensors.index.json" in refused(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    with Checkpoint(tmp_path, EXPECTED) as checkpoint:
        assert torch.equal(checkpoint.take("b.weight"), tensors()["b.weight"])
    (tmp_path / "model-00002.safetensors").unlink()
    assert re.search(r"model-00002\.safetensors is missing", refused(tmp_path))


def test_index_cannot_point_outside(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": "../x.safetensors"}}))
    assert "'../x.safetensors'" in refused(tmp_path)


def test_index_names_files_that_are_called_as_weights_are(tmp_path: Path) -> None:
    """Others are not in the weights' revision, and nobody looks where they lead."""
    save_file(tensors(), tmp_path / "weights.st")
    index = {"weight_map": dict.fromkeys(tensors(), "weights.st")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "'weights.st' is not called *.safetensors" in refused(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path)
    path.write_bytes(path.read_bytes()[:keep])
    assert str(path) in refused(tmp_path) and "not a complete safetensors file" in refused(tmp_path)


def test_corrupt_header(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path)
    path.write_bytes(path.read_bytes()[:8] + b"!" * 200)
    assert "not a complete safetensors file" in refused(tmp_path)


def test_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path)
    with Checkpoint(tmp_path, EXPECTED) as checkpoint:
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(WeightsError, match=r"b\.weight ends \d+ bytes early"):
            checkpoint.take("b.weight")


def test_every_wrong_tensor_is_named_at_once(tmp_path: Path) -> None:
    save_file(
        {"a.weight": torch.zeros(4, 3), "extra.bias": torch.zeros(2), "rotary_emb.inv_freq": torch.zeros(2)},
        tmp_path / "model.safetensors",
    )
    text = refused(tmp_path)
    assert "a.weight has shape [4, 3], config.json asks for [3, 4]" in text
    assert "tensor b.weight [2, 4] is missing" in text
    assert "extra.bias is not part of the architecture" in text
    assert "inv_freq" not in text


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    save_file({**tensors(), "a.weight": torch.zeros(3, 4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    assert "a.weight has dtype I8; supported: F32, F16, BF16" in refused(tmp_path)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "pytorch_model.bin")
    assert "only pytorch_model.bin, which is a pickle and is not loaded" in refused(tmp_path)


def test_empty_directory(tmp_path: Path) -> None:
    assert "no weights" in refused(tmp_path)
