"""The CPU as a device: explicit choices win, limits of a container count, what is captured repeats exactly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from isthmus_kernels import dispatch, native
from isthmus_runtime.errors import ConfigError
from isthmus_runtime.executor.device import cpu
from isthmus_runtime.executor.device.cpu import CpuDevice


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control group directory that tests fill."""
    monkeypatch.setattr(cpu, "_CGROUP", tmp_path)
    return tmp_path


def test_threads(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(8)))
    assert cpu.usable_threads(3) == 3
    assert cpu.usable_threads(0) == 8
    for quota, threads in (("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8)):
        (cgroup / "cpu.max").write_text(quota + "\n")
        assert cpu.usable_threads(0) == threads


def test_free_memory_is_capped_by_the_container(cgroup: Path) -> None:
    free = cpu.free_memory_bytes()
    assert free > 1 << 20
    (cgroup / "memory.max").write_text("max\n")
    assert cpu.free_memory_bytes() > 1 << 20
    (cgroup / "memory.max").write_text("1000000\n")
    (cgroup / "memory.current").write_text("700000\n")
    (cgroup / "memory.stat").write_text("anon 5\ninactive_file 100000\n")
    assert cpu.free_memory_bytes() == 400_000
    (cgroup / "memory.current").write_text("7000000\n")
    assert cpu.free_memory_bytes() == 0


@pytest.mark.parametrize(("fast", "chosen"), [(False, torch.float32), (True, torch.bfloat16)])
def test_the_compute_dtype_follows_from_the_instructions(
    fast: bool, chosen: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "multiplies_bf16", lambda: fast)
    assert CpuDevice().dtype("auto") == chosen
    assert CpuDevice().dtype("float32") == torch.float32


def test_unknown_dtype() -> None:
    with pytest.raises(ConfigError, match="'half' is not supported; known: auto, float32, bfloat16"):
        CpuDevice().dtype("half")


def test_the_pool_is_a_share_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "free_memory_bytes", lambda: 1000)
    assert CpuDevice().kv_bytes(0.25) == 250


@pytest.mark.slow
def test_capturing_does_not_import_the_compiler_of_torch() -> None:
    """Which takes seconds, and fails for a user without a name: a container's."""
    code = """
import sys, torch
from isthmus_runtime.executor.device.cpu import CpuDevice
x = torch.ones(4)
assert CpuDevice().capture(lambda: x[:2].add_(1), None) is None
sys.exit(str([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules]))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ran.stderr.strip().splitlines()[-1] == "[]", ran.stderr


@pytest.mark.skipif(not native.available(), reason="the compiled library is not built")
def test_compiled_operations_are_captured() -> None:
    x, out = torch.randn(3, 16), torch.empty(3, 8)
    replay = CpuDevice().capture(lambda: dispatch.silu_mul(x, out=out), None)
    assert replay is not None
    expected = dispatch.silu_mul(x.neg_())
    replay()
    assert torch.equal(out, expected)


def test_what_torch_computes_is_not_captured() -> None:
    """A program without it would replay something else."""
    x, out = torch.randn(3, 16), torch.empty(3, 8)

    def body() -> None:
        dispatch.silu_mul(x, out=out)
        out.mul_(2)

    assert CpuDevice().capture(body, None) is None
    assert torch.equal(out, dispatch.silu_mul(x) * 2)


def test_views_and_fresh_memory_are_captured() -> None:
    x, out = torch.randn(3, 16), torch.empty(4, 8)
    captured = CpuDevice().capture(lambda: dispatch.silu_mul(x.view(3, 16)[:2], out=out[:2]), None)
    assert (captured is not None) == native.available()
