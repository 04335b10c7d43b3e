"""Weights on their way to a device: the checkpoint's bytes, whatever the pieces and the order of work."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from fake_device import FakeDevice
from safetensors.torch import save_file

from isthmus_runtime.checkpoints.quantized import scheme_of
from isthmus_runtime.checkpoints.safetensors import Checkpoint
from isthmus_runtime.errors import WeightsError
from isthmus_runtime.executor.weights import StagedWeights
from isthmus_runtime.models.quantization import Quantization
from isthmus_runtime.models.shard import Slice

EXPECTED = {"a.weight": (3, 4), "b.weight": (2, 4)}


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.arange(8 + 4 * (shape[0] - 2)).reshape(shape).float() for name, shape in EXPECTED.items()}


@pytest.mark.parametrize("piece", [7, 16, 1 << 10])
@pytest.mark.parametrize("mixed", [False, True])
def test_staged_weights_are_the_checkpoints(piece: int, mixed: bool, tmp_path: Path) -> None:
    """Whatever the pieces; staging is garbage again as soon as its copy ran, and copies run as late as they may."""
    made = tensors()
    if mixed:
        made["a.weight"] = made["a.weight"].half()
    save_file(made, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, EXPECTED) as checkpoint, ThreadPoolExecutor(3) as readers:
        device = FakeDevice()
        staged = StagedWeights(checkpoint, device, readers, piece)
        taken = [staged.take(*names) for names in (("b.weight", "a.weight"), ("a.weight",), ("b.weight",))]
        device.record().wait()
        expected = [checkpoint.take(*names) for names in (("b.weight", "a.weight"), ("a.weight",), ("b.weight",))]
    for got, want in zip(taken, expected, strict=True):
        assert got.dtype == want.dtype
        if not mixed:
            assert torch.equal(got, want)


@pytest.mark.parametrize("piece", [7, 16, 1 << 10])
def test_slices_are_staged_as_they_are_read(piece: int, tmp_path: Path) -> None:
    """Rows, columns and joined rows of both kinds of source are those of the whole tensors."""
    made = {name: torch.randn(shape) for name, shape in EXPECTED.items()}
    save_file(made, tmp_path / "model.safetensors")
    rows, columns = Slice("a.weight", 0, 1, 3), Slice("a.weight", 1, 1, 3)
    expected = [made["a.weight"][1:3], made["a.weight"][:, 1:3], torch.cat([made["b.weight"], made["a.weight"][1:3]])]
    with Checkpoint(tmp_path, EXPECTED) as checkpoint, ThreadPoolExecutor(3) as readers:
        device = FakeDevice()
        staged = StagedWeights(checkpoint, device, readers, piece)
        for source in (checkpoint, staged):
            taken = [source.take(rows), source.take(columns), source.take("b.weight", rows)]
            device.record().wait()
            for got, want in zip(taken, expected, strict=True):
                assert torch.equal(got, want)


@pytest.mark.parametrize("settings", [Quantization(method="fp8"), Quantization(method="gptq", bits=4, group_size=8)])
def test_parts_of_quantised_weights_are_staged_as_they_are(settings: Quantization, tmp_path: Path) -> None:
    """Whole numbers, 8-bit floats, and a single number."""
    if settings.method == "fp8":
        made = {"a.weight": torch.randn(16, 8).to(torch.float8_e4m3fn), "a.weight_scale": torch.tensor(0.5)}
    else:
        made = {
            "a.qweight": torch.arange(16, dtype=torch.int32).view(1, 16) * 12345,
            "a.qzeros": torch.tensor([[-7, 9]], dtype=torch.int32),
            "a.scales": torch.rand(1, 16),
        }
    save_file(made, tmp_path / "model.safetensors")
    shapes = {"a.weight": (16, 8)}
    with (
        Checkpoint(tmp_path, shapes, scheme=scheme_of(settings)) as checkpoint,
        ThreadPoolExecutor(3) as readers,
    ):
        assert list(checkpoint.parts["a.weight"]) == list(made)
        device = FakeDevice()
        staged = StagedWeights(checkpoint, device, readers, 16)
        taken = {name: staged.take(name) for name in made}
        device.record().wait()
    for name, part in made.items():
        assert taken[name].dtype == part.dtype
        assert torch.equal(taken[name].float(), part.reshape(taken[name].shape).float()), name


def test_a_file_that_shrinks_is_an_error_in_staged_reads_too(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path)
    with Checkpoint(tmp_path, EXPECTED) as checkpoint, ThreadPoolExecutor(3) as readers:
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(WeightsError, match=r"b\.weight ends \d+ bytes early"):
            StagedWeights(checkpoint, FakeDevice(), readers, 8).take("b.weight")
