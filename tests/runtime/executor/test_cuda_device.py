"""What a GPU refuses or fails with, in words for whoever runs the engine. No GPU is needed here: tests/gpu has one."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_config import CONFIG

from isthmus_kernels import batch_invariance, native
from isthmus_kernels.device import scratch
from isthmus_runtime.config import ModelConfig
from isthmus_runtime.errors import ConfigError
from isthmus_runtime.executor.device import cuda
from isthmus_runtime.executor.device.cpu import CpuDevice
from isthmus_runtime.executor.device.cuda import CudaDevice
from isthmus_runtime.executor.device.select import open_device
from isthmus_runtime.executor.loading import load

NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU\nand more"
OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 11040). Please update"


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with one good GPU, as torch describes it."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    return monkeypatch


def failing(message: str) -> object:
    def fail() -> None:
        raise RuntimeError(message)

    return fail


def test_a_good_card_is_usable(card: pytest.MonkeyPatch) -> None:
    assert cuda.unusable() == ""


@pytest.mark.parametrize("message", [NO_DRIVER, OLD_DRIVER])
def test_a_missing_or_old_driver_is_named(message: str, card: pytest.MonkeyPatch) -> None:
    card.setattr(torch.cuda, "init", failing(message))
    with pytest.raises(ConfigError, match=f"--device cuda: {message.splitlines()[0][:40]}") as caught:
        open_device("cuda")
    assert "nvidia-smi" in str(caught.value) and "and more" not in str(caught.value)
    assert isinstance(open_device("auto", threads=1), CpuDevice)


def test_a_machine_without_a_c_compiler_is_told_before_a_kernel_needs_it(card: pytest.MonkeyPatch) -> None:
    card.setattr(cuda, "which", lambda _: None)
    with pytest.raises(ConfigError, match="neither gcc nor clang is on the PATH"):
        open_device("cuda")
    card.setattr(cuda, "which", lambda name: "/usr/bin/clang" if name == "clang" else None)
    assert cuda.unusable() == ""


def test_no_card_an_old_card_and_a_torch_without_cuda(card: pytest.MonkeyPatch) -> None:
    card.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert "NVIDIA X has compute capability 7.5, the kernels need 8.0" in cuda.unusable()
    card.setattr(torch.cuda, "device_count", lambda: 0)
    assert "nvidia.com/gpu" in cuda.unusable()
    card.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert "is built without CUDA" in cuda.unusable()


@pytest.mark.parametrize("asked", ["cuda", "auto"])
@pytest.mark.parametrize(
    "message", ["all CUDA-capable devices are busy or unavailable", "out of memory", "GPU is lost"]
)
def test_a_card_that_cannot_be_opened_is_told_in_a_line(message: str, asked: str, card: pytest.MonkeyPatch) -> None:
    """The driver describes such a card, and fails when somebody computes on it. Nobody gets a CPU in its stead."""

    def fail(_: object) -> None:
        raise torch.AcceleratorError(f"CUDA error: {message}\nCUDA kernel errors might be reported later")

    card.setattr(torch.cuda, "set_device", lambda _: None)
    card.setattr(torch.cuda, "Stream", fail)
    with pytest.raises(
        ConfigError, match=rf"--device {asked}: cuda:0 cannot be opened \(CUDA error: {message}\); .*Xid"
    ):
        open_device(asked)


def test_a_rank_without_a_card_of_its_own(card: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="rank 1 needs a GPU of its own and the driver shows 1"):
        open_device("cuda", index=1)


def test_unknown_device() -> None:
    with pytest.raises(ConfigError, match="--device 'tpu' is not supported; known: auto, cpu, cuda"):
        open_device("tpu")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """A CudaDevice with 100 GiB, 20 of them taken, that touches no driver."""
    device = object.__new__(CudaDevice)
    device.name, device.torch_device = "cuda:0", torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80 << 30, 100 << 30))
    return device


def test_the_memory_fraction_is_of_the_whole_card(gpu: CudaDevice) -> None:
    assert gpu.kv_bytes(0.9) == (90 - 20 - 1) << 30


def test_what_is_taken_after_the_start_is_held_to_the_fraction(
    gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = gpu.kv_bytes(0.9, 2 << 30)
    assert left == (90 - 20 - 1 - 2) << 30
    monkeypatch.setattr(torch, "zeros", lambda nbytes, **_: range(nbytes))
    gpu.pool(left)
    for steps, over in ((3, 0), (5, 2)):
        free = (100 - 20 - steps << 30) - left
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 100 << 30))
        with caplog.at_level("INFO"):
            assert gpu.overdrawn(0.9) == over << 30
        assert f"graphs and steps took {steps}.00 GiB beside the KV pool, 3.00 GiB were set aside" in caplog.text


def test_a_card_too_small_is_refused_with_its_numbers(gpu: CudaDevice) -> None:
    with pytest.raises(
        ConfigError, match=r"20\.0 of 100\.0 GiB are taken .* need 1\.00 GiB.*gpuMemoryFraction.* allows 20\.0 GiB"
    ):
        gpu.kv_bytes(0.2)


def test_a_pool_that_does_not_fit_is_refused(gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(ConfigError, match=r"KV pool of 90\.0 GiB does not fit cuda:0: 80\.0 of 100\.0 GiB are free"):
        gpu.pool(90 << 30)


def test_errors_of_a_running_card_say_what_to_do(gpu: CudaDevice) -> None:
    memory = gpu.explain(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand so on"))
    assert "cuda:0 is out of memory (CUDA out of memory. Tried to allocate 2 GiB)" in memory
    assert "--max-batched-tokens" in memory
    for text in ("CUDA error: an illegal memory access was encountered\nCUDA kernel errors", "CUDA error: GPU is lost"):
        lost = gpu.explain(RuntimeError(text))
        assert text.splitlines()[0] in lost and "must be restarted" in lost and "Xid" in lost
    assert gpu.explain(IndexError("index 9")) == "IndexError: index 9"


def test_sizes_to_capture_end_at_the_most_rows(gpu: CudaDevice) -> None:
    for rows, last in ((1, 1), (3, 4), (64, 64), (250, 256), (257, 272), (1000, 1024)):
        sizes = gpu.graph_sizes(rows)
        assert sizes[-1] == last and list(sizes) == sorted(set(sizes)) and sizes[0] == 1
        # Padding wastes little where steps are long.
        assert all(b - a <= max(8, b // 8) for a, b in itertools.pairwise(sizes))


def test_devices_on_two_streams_have_scratch_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _: None)

    def entered(stream: int) -> torch.Tensor:
        device = object.__new__(CudaDevice)
        device.torch_device = torch.device("cuda:0")
        device._stream = SimpleNamespace(cuda_stream=stream)  # type: ignore[assignment]
        with ThreadPoolExecutor(1) as thread:
            thread.submit(device.enter).result()
            return thread.submit(scratch, "entered", torch.device("cpu"), (2,), torch.int32).result()

    assert entered(1) is entered(1) and entered(1) is not entered(2)


def test_rows_are_alike_in_any_batch_where_that_is_asked_for(card: pytest.MonkeyPatch) -> None:
    card.setattr(torch.cuda, "set_device", lambda _: None)
    card.setattr(torch.cuda, "Stream", lambda _: None)
    card.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    properties = SimpleNamespace(name="X", total_memory=1 << 36, major=9, minor=0, multi_processor_count=132)
    card.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    for asked in (True, False):
        device = open_device("cuda", deterministic=asked)
        assert batch_invariance.required(device.torch_device) is asked
        # Products of 8-bit and of 4-bit floats depend on the batch.
        assert device.multiplies_fp8 is not asked
        assert device.multiplies_mxfp4 is not asked
        assert device.reads_fp8
    card.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    assert not open_device("cuda").reads_fp8


def test_a_cpu_without_compiled_kernels_computes_no_rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    assert isinstance(open_device("cpu", threads=1), CpuDevice)
    with pytest.raises(ConfigError, match=r"--deterministic on: .* the compiled CPU kernels are missing"):
        open_device("cpu", threads=1, deterministic=True)


class _Gpu(CpuDevice):
    name = "cuda:0"
    torch_device = torch.device("cuda:0")


def test_no_model_is_loaded_as_deterministic_onto_a_gpu_that_was_not_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(AssertionError, match="cuda:0 was not opened as deterministic"):
        load(ModelConfig(path=str(tmp_path), deterministic=True), device=_Gpu())
