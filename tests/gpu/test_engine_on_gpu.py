"""The executor on a real GPU: the same greedy tokens as on the CPU in float32, graphs, a pool over the whole card."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from isthmus_runtime.checkpoints.random import RandomTensors
from isthmus_runtime.config import KvConfig, ModelConfig, SchedulerConfig
from isthmus_runtime.errors import ConfigError
from isthmus_runtime.executor.loading import LoadedModel, load
from isthmus_runtime.executor.model_runner import TorchExecutor
from isthmus_runtime.interfaces.steps import Chunk, RowStart, StepPlan
from isthmus_runtime.kv.plan import KvPlanInput, plan
from isthmus_runtime.models.base import ModelSpec
from isthmus_runtime.models.shard import Slice
from isthmus_runtime.request import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU: the executor was not tried on one"),
]

DEADLINE_S = 240.0
ROWS, PROMPT, COUNT, BLOCK = 11, 37, 24, 16
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 1031,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}


class _OnGpu:
    """Weights that are the same on every device."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        cpu = torch.device("cpu")
        self._source = RandomTensors(spec.tensor_shapes(), device=cpu, dtype=torch.float32, seed=2)
        self._device = device

    def take(self, *parts: str | Slice) -> torch.Tensor:
        return self._source.take(*parts).to(self._device)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    yield tmp_path
    torch.cuda.empty_cache()


SCHEDULER = SchedulerConfig(max_batched_tokens=512, max_num_seqs=16, max_model_len=128)


def open_model(folder: Path, device: str) -> LoadedModel:
    return load(ModelConfig(path=str(folder), device=device, dtype="float32"), SCHEDULER, source=_OnGpu)


def open_engine(loaded: LoadedModel, blocks: int, kv_dtype: str = "auto") -> TorchExecutor:
    kv_plan = plan(
        KvPlanInput(
            ranks=(loaded.layer_specs(BLOCK, kv_dtype),),
            available_bytes=(1 << 40,),
            max_model_len=128,
            max_num_batched_tokens=512,
            num_blocks_override=blocks,
        )
    )
    return TorchExecutor(loaded, kv_plan, SCHEDULER, KvConfig(block_size=BLOCK, dtype=kv_dtype))


def start(
    folder: Path, device: str, *, blocks: int = ROWS * 8 + 1, kv_dtype: str = "auto"
) -> tuple[LoadedModel, TorchExecutor]:
    loaded = open_model(folder, device)
    return loaded, open_engine(loaded, blocks, kv_dtype)


def generate(executor: TorchExecutor, sampling: SamplingParams, first_block: int = 1) -> list[list[int]]:
    """A prompt a row, then decode steps, two in flight, of which each starts on a token that nobody has seen."""
    rng = random.Random(4)
    starts = tuple(
        RowStart(
            row, "r", [rng.randrange(1031) for _ in range(PROMPT)], PROMPT,
            (tuple(range(first_block + row * 8, first_block + row * 8 + 8)),), sampling,
        )
        for row in range(ROWS)
    )  # fmt: skip
    plans = [StepPlan(0, starts, (), tuple(Chunk(r, 0, PROMPT, 1) for r in range(ROWS)), ROWS * PROMPT)]
    plans += [
        StepPlan(n, (), (), tuple(Chunk(r, PROMPT + n - 1, 1, 1) for r in range(ROWS)), ROWS) for n in range(1, COUNT)
    ]
    found = [future.result(DEADLINE_S) for future in [executor.submit(plan) for plan in plans]]
    return [[step.rows[row].tokens[0] for step in found] for row in range(ROWS)]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tokens_equal_the_cpu(folder: Path, temperature: float) -> None:
    """Greedy by graphs, seeded draws without; 11 rows run as 16."""
    sampling = SamplingParams(max_tokens=COUNT, temperature=temperature, seed=5, top_k=40)
    found = []
    for device in ("cpu", "cuda"):
        _, executor = start(folder, device)
        found.append(generate(executor, sampling))
        executor.close()
    assert found[0] == found[1]
    assert len({token for row in found[0] for token in row}) > 50


def test_keys_and_values_of_8_bit_floats(folder: Path) -> None:
    """A number now and then is rounded to its other neighbour, so texts may part; most do not."""
    found = []
    for device in ("cpu", "cuda"):
        _, executor = start(folder, device, kv_dtype="fp8")
        found.append(generate(executor, SamplingParams(max_tokens=COUNT, temperature=0.0)))
        executor.close()
    same = sum(one == other for pair in zip(*found, strict=True) for one, other in zip(*pair, strict=True))
    assert same > 0.8 * ROWS * COUNT


def test_closed_engines_leave_their_model_and_memory_to_others(folder: Path) -> None:
    """Three engines one after the other on one loaded model; graphs and pools of the first two are given back."""
    loaded = open_model(folder, "cuda")
    found, left = [], []
    for _ in range(3):
        executor = open_engine(loaded, ROWS * 8 + 1)
        found.append(generate(executor, SamplingParams(max_tokens=COUNT, temperature=0.0)))
        executor.close()
        del executor
        gc.collect()
        torch.cuda.empty_cache()
        left.append(torch.cuda.memory_reserved())
    assert found[0] == found[1] == found[2]
    assert left[0] == left[1] == left[2], "an engine that was closed keeps memory"


def test_a_pool_over_the_whole_card(folder: Path) -> None:
    """More than 100,000 blocks, past 2^32 elements; the last ones are written and read."""
    loaded, small = start(folder, "cuda")
    expected = generate(small, SamplingParams(max_tokens=COUNT, temperature=0.0))
    block = sum(spec.page_bytes * spec.layers for spec in loaded.layer_specs(BLOCK, "auto"))
    small.close()
    blocks = loaded.device.kv_bytes(0.9) // block
    del loaded
    assert blocks > 100_000
    _, executor = start(folder, "cuda", blocks=blocks)
    assert executor.kv_region().device == "cuda:0" and executor.kv_region().num_blocks == blocks
    assert generate(executor, SamplingParams(max_tokens=COUNT, temperature=0.0), blocks - ROWS * 8) == expected
    executor.close()


def test_a_pool_that_does_not_fit_is_a_clear_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="does not fit cuda:0"):
        start(folder, "cuda", blocks=1 << 23)
