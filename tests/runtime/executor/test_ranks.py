"""Several ranks, one plan: every rank runs what rank 0 broadcasts, and pools that differ are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import rank_process
from lora_adapters import save_adapter
from rank_process import adapted, executor, steps
from tiny_config import SMALLEST

from isthmus_runtime.checkpoints.random import RandomTensors
from isthmus_runtime.errors import ConfigError
from isthmus_runtime.executor import ranks
from isthmus_runtime.executor.ranks import decode, encode
from isthmus_runtime.interfaces.steps import AdapterSlot, BlockCopy, Chunk, RowBlocks, RowMask, RowStart, StepPlan
from isthmus_runtime.models.registry import read_model_spec
from isthmus_runtime.request import SamplingParams

DEADLINE_S = 240.0
CONFIG = {**SMALLEST, "max_position_embeddings": 64}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A tiny Llama of random weights."""
    import torch
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shapes = read_model_spec(tmp_path).tensor_shapes()
    source = RandomTensors(shapes, device=torch.device("cpu"), dtype=torch.float32, seed=5)
    save_file({name: source.take(name) for name in shapes}, tmp_path / "model.safetensors")
    return tmp_path


def start_ranks(folder: Path, blocks: tuple[int, int], adapter: str = "") -> list[subprocess.Popen[str]]:
    """Both ranks."""
    out = folder / "tokens.json"
    return [
        subprocess.Popen(
            [sys.executable, rank_process.__file__, *map(str, (rank, folder, folder / "meeting", count, out, adapter))],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, count in enumerate(blocks)
    ]


def run_ranks(folder: Path, blocks: tuple[int, int], adapter: str = "") -> list[tuple[int, str]]:
    """Both ranks to their end: exit status and output of each."""
    processes = start_ranks(folder, blocks, adapter)
    try:
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("with_adapter", [False, True])
def test_two_ranks_run_one_plan(model_dir: Path, with_adapter: bool) -> None:
    alone, slots = executor(str(model_dir), 9)
    plans, folder = steps(), ""
    if with_adapter:
        folder = str(model_dir / "adapter")
        save_adapter(model_dir / "adapter", read_model_spec(model_dir).tensor_shapes(), seed=2, size=2.0)
        adapter = slots.read(folder)
        slots.keep(adapter)
        plans = adapted(adapter.digest)
    expected = [alone.submit(step).result(DEADLINE_S).rows[0].tokens[0] for step in plans]
    alone.close()
    assert [status for status, _ in run_ranks(model_dir, (9, 9), folder)] == [0, 0]
    assert json.loads((model_dir / "tokens.json").read_text()) == expected
    assert len(set(expected)) > 2


@pytest.mark.slow
def test_ranks_with_different_pools_are_refused_by_both(model_dir: Path) -> None:
    for status, output in run_ranks(model_dir, (9, 8)):
        assert status == 2
        assert "rank 0 has 9 blocks of layout" in output and "rank 1 has 8 blocks" in output


@pytest.mark.slow
def test_a_rank_that_stands_still_is_lost(model_dir: Path) -> None:
    first, other = start_ranks(model_dir, (9, 9), "stop")
    with first, other:
        try:
            told = first.communicate(timeout=DEADLINE_S)[0]
        finally:
            first.kill()
            other.kill()
    assert "step 1 was not run: a rank of this engine is lost: it did not take what it was told within 1 s" in told


def test_a_plan_survives_its_journey() -> None:
    sampling = SamplingParams(max_tokens=4, temperature=0.3, seed=-7, stop_token_ids=(1, 2), logprobs=3)
    plan = StepPlan(
        7,
        (RowStart(3, "résumé", [1, 2, 3], 2, ((4, 5), (0,)), sampling, adapter=1),),
        (RowBlocks(3, 1, 2, (9,)),),
        (Chunk(3, 0, 2, 0), Chunk(1, 5, 3, 3, (8, 9))),
        5,
        copies=(BlockCopy(1, 2),),
        adapters=(AdapterSlot(1, "a", "d"),),
        masks=(RowMask(3, (bytes(range(256)), b"")),),
    )
    assert decode(encode(plan)) == plan
    with pytest.raises(ValueError, match="num_tokens"):
        decode(b'[{"step": 1}]')


def test_a_rank_that_does_not_come_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time that processes have for their start: it was that of a step, and the library's error was all."""
    import torch

    monkeypatch.setattr(ranks, "MEETING_S", 0.2)
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 2: rank 0 has not met all others within 0\.2 s"):
        ranks.join(0, 2, str(tmp_path / "meeting"), torch.device("cpu"), 60.0)
