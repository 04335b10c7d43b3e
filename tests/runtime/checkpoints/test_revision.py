"""Weights that differ have another name, wherever they differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from isthmus_runtime.checkpoints.provenance import MARKER, SOURCE_FILE, Origin, record_files
from isthmus_runtime.checkpoints.revision import weights_revision
from isthmus_runtime.errors import WeightsError

LAYERS = 12
SHAPES = {"embed": (3000, 64), **{f"layers.{n}.norm": (576,) for n in range(LAYERS)}}
SHAPES |= {f"layers.{n}.k_proj": (96, 576) for n in range(LAYERS)}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


def write(folder: Path, held: dict[str, torch.Tensor], *, files: int = 2, config: str = "{}") -> str:
    folder.mkdir(exist_ok=True)
    names = list(held)
    for number in range(files):
        save_file({name: held[name] for name in names[number::files]}, folder / f"model-{number}.safetensors")
    (folder / "config.json").write_text(config)
    return weights_revision(str(folder))


def test_each_tensor_counts(tmp_path: Path) -> None:
    held, seen = tensors(), set[str]()
    seen.add(write(tmp_path / "m", held))
    assert write(tmp_path / "copy", tensors()) in seen
    for name in held:
        changed = write(tmp_path / "m", held | {name: held[name] * 1.25})
        assert changed not in seen, name
        seen.add(changed)
    one = held["layers.7.norm"].clone()
    one[300] += 1
    assert write(tmp_path / "m", held | {"layers.7.norm": one}) not in seen
    assert write(tmp_path / "m", held, config='{"a": 1}') not in seen


def test_files_that_an_index_chooses_count(tmp_path: Path) -> None:
    """A folder with two sets of weights, of which another commit reads the other."""
    seen = set()
    for name in ("a", "b", "neither"):
        folder = tmp_path / name
        write(folder, tensors())
        if name != "neither":
            chosen = {"weight_map": dict.fromkeys(SHAPES, f"model-{name}.safetensors")}
            (folder / "model.safetensors.index.json").write_text(json.dumps(chosen))
        seen.add(weights_revision(str(folder)))
    assert len(seen) == 3


def middle(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """With a value changed that no sample has, of `name`."""
    held = tensors()
    flat = held[name].view(-1)
    before = write(folder, held)
    flat[len(flat) // 2 + 1] += 1
    assert write(folder, held) == before
    return held


def test_what_was_recorded_counts(tmp_path: Path) -> None:
    held, folder = middle("embed", tmp_path / "m"), tmp_path / "m"
    names = set[str]()
    for one in (tensors(), held):
        (folder / SOURCE_FILE).unlink(missing_ok=True)
        write(folder, one)
        record_files(folder, Origin(source="s3://b/m"))
        names.add(weights_revision(str(folder)))
    (folder / SOURCE_FILE).unlink()
    for digest in ("a", "b"):
        (folder / MARKER).write_text(json.dumps({"sha256": digest * 64}))
        names.add(weights_revision(str(folder)))
    assert len(names) == 4


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\x02" + bytes(7) + b"[]", b"\x09" + bytes(7) + b'{"a": {}}'], ids=str
)
def test_what_is_no_safetensors_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=r"model\.safetensors has no header of safetensors"):
        weights_revision(str(tmp_path))
