"""What the machine offers: explicit choices win, limits of a container count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isthmus_runtime.errors import ConfigError
from isthmus_runtime.executor import compute


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control group directory that tests fill."""
    monkeypatch.setattr(compute, "_CGROUP", tmp_path)
    return tmp_path


def test_threads(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(8)))
    assert compute.usable_threads(3) == 3
    assert compute.usable_threads(0) == 8
    for quota, threads in (("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8)):
        (cgroup / "cpu.max").write_text(quota + "\n")
        assert compute.usable_threads(0) == threads


def test_free_memory_is_capped_by_the_container(cgroup: Path) -> None:
    free = compute.free_memory_bytes()
    assert free > 1 << 20
    (cgroup / "memory.max").write_text("max\n")
    assert compute.free_memory_bytes() > 1 << 20
    (cgroup / "memory.max").write_text("1000000\n")
    (cgroup / "memory.current").write_text("700000\n")
    (cgroup / "memory.stat").write_text("anon 5\ninactive_file 100000\n")
    assert compute.free_memory_bytes() == 400_000
    (cgroup / "memory.current").write_text("7000000\n")
    assert compute.free_memory_bytes() == 0


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ({}, torch.float32),
        ({"avx512_f": True, "amx_tile": True, "amx_bf16": False}, torch.float32),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": True}, torch.bfloat16),
    ],
)
def test_the_compute_dtype_follows_from_the_instructions(
    found: dict[str, bool], chosen: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    assert compute.choose_dtype("auto") == chosen
    assert compute.choose_dtype("float32") == torch.float32


def test_unknown_dtype() -> None:
    with pytest.raises(ConfigError, match="'half' is not supported; known: auto, float32, bfloat16"):
        compute.choose_dtype("half")
