"""The executor as the engine sees it: order, failure, end, sampling, start-up records."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from isthmus_runtime.config import ModelConfig
from isthmus_runtime.errors import ConfigError, EngineFailed, WeightsError
from isthmus_runtime.executor.device import cpu
from isthmus_runtime.executor.loading import load
from isthmus_runtime.interfaces.steps import NOTHING_DRAWN, Chunk, RowStart, StepPlan
from isthmus_runtime.kv.groups import LayerSpec
from isthmus_runtime.models.registry import read_model_spec
from isthmus_runtime.request import SamplingParams

DEADLINE_S = 60.0
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 2,
    "tie_word_embeddings": True,
}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """Random weights of a small Qwen2 with two full layers and two sliding ones."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(1)
    shapes = read_model_spec(tmp_path).tensor_shapes()
    save_file({n: torch.randn(s, generator=generator) for n, s in shapes.items()}, tmp_path / "model.safetensors")
    return tmp_path


def step(number: int, *, sampling: SamplingParams | None = None, chunk: Chunk | None = None) -> StepPlan:
    start = RowStart(0, "r", [1, 2, 3], 3, ((1,), (2,)), sampling or SamplingParams(max_tokens=1, temperature=0.0))
    chunk = chunk or Chunk(0, 0, 3, draws=1)
    return StepPlan(number, (start,), (), (chunk,), chunk.num_tokens)


def test_layer_specs_join_neighbours_of_one_kind(model_dir: Path) -> None:
    loaded = load(ModelConfig(path=str(model_dir), device="cpu", dtype="float32"))
    full, sliding = loaded.layer_specs(8, "bfloat16")
    assert (full.kind, full.layers, full.window, full.dtype) == ("full", 2, None, "bf16")
    assert (sliding.kind, sliding.layers, sliding.window, sliding.head_dim) == ("sliding", 2, 8, 8)
    assert loaded.layer_specs(8, "auto")[0].dtype == "fp32"
    assert 0 < loaded.device.kv_bytes(0.5) < 1 << 50
    with pytest.raises(ConfigError, match="--kv-dtype 'int3'"):
        loaded.layer_specs(8, "int3")


def test_two_groups_share_the_pool(model_dir: Path, start_engine: Callable[..., Any]) -> None:
    engine = start_engine(model_dir)
    assert len(engine.plan.groups) == 2
    assert engine.executor.kv_region().num_blocks == engine.plan.num_blocks


def test_steps_without_samples_or_chunks_answer_with_no_tokens(
    model_dir: Path, start_engine: Callable[..., Any]
) -> None:
    executor = start_engine(model_dir).executor
    partial = executor.submit(step(1, chunk=Chunk(0, 0, 2, draws=0)))
    empty = executor.submit(StepPlan(2, (), (), (), 0))
    last = executor.submit(StepPlan(3, (), (), (Chunk(0, 2, 1, draws=1),), 1))
    assert partial.result(DEADLINE_S).rows == (NOTHING_DRAWN,) and empty.result(DEADLINE_S).rows == ()
    assert len(last.result(DEADLINE_S).rows[0].tokens) == 1
    assert last.result(DEADLINE_S).rows == executor.submit(step(4)).result(DEADLINE_S).rows
    assert [f.result().step for f in (partial, empty, last)] == [1, 2, 3]


def test_seeded_draws_repeat(model_dir: Path, start_engine: Callable[..., Any]) -> None:
    executor = start_engine(model_dir).executor
    sampling = SamplingParams(max_tokens=1, temperature=5.0, seed=11, logprobs=2)
    first, second = (executor.submit(step(n, sampling=sampling)).result(DEADLINE_S) for n in (1, 2))
    assert first.rows == second.rows
    assert len(first.rows[0].logprobs[0].top) == 2
    others = {
        executor.submit(step(3 + n, sampling=SamplingParams(max_tokens=1, temperature=5.0, seed=n)))
        .result(DEADLINE_S)
        .rows
        for n in range(20)
    }
    assert len(others) > 1


def test_failed_step_fails_it_and_all_later_ones(model_dir: Path, start_engine: Callable[..., Any]) -> None:
    executor = start_engine(model_dir).executor
    executor.submit(step(1)).result(DEADLINE_S)
    futures = [executor.submit(step(n, chunk=Chunk(99 if n == 2 else 0, 0, 3, draws=1))) for n in range(2, 6)]
    for number, future in enumerate(futures, start=2):
        error = future.exception(DEADLINE_S)
        assert isinstance(error, EngineFailed)
        assert "step 2 failed: IndexError" in str(error) and f"step {number}" in str(error)
    assert isinstance(executor.submit(step(9)).exception(DEADLINE_S), EngineFailed)
    executor.close()


def test_too_many_tokens_break_the_step_not_the_memory(model_dir: Path, start_engine: Callable[..., Any]) -> None:
    executor = start_engine(model_dir, budget=2).executor
    assert "step 1 failed" in str(executor.submit(step(1)).exception(DEADLINE_S))


def test_close_fails_what_waits_and_what_comes(model_dir: Path, start_engine: Callable[..., Any]) -> None:
    executor = start_engine(model_dir).executor
    futures = [executor.submit(step(n)) for n in range(30)]
    executor.close()
    for future in futures:
        error = future.exception(DEADLINE_S)
        assert error is None or "the executor is closed" in str(error)
    assert "the executor is closed" in str(executor.submit(step(99)).exception(DEADLINE_S))
    executor.close()


def test_bfloat16_runs_close_to_float32(model_dir: Path, start_engine: Callable[..., Any]) -> None:
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=31)
    tables = []
    kinds = (
        ("float32", "auto"),
        ("bfloat16", "auto"),
        ("bfloat16", "float32"),
        ("float32", "fp8"),
        ("bfloat16", "fp8"),
    )
    for dtype, kv_dtype in kinds:
        engine = start_engine(model_dir, dtype=dtype, kv_dtype=kv_dtype)
        output = engine.executor.submit(step(1, sampling=sampling)).result(DEADLINE_S)
        tables.append(dict(output.rows[0].logprobs[0].top))
    # Random unit weights make large logits; bf16 keeps three digits of them, and KV of 8 bits one of its own.
    scale = max(abs(value) for value in tables[0].values())
    for table in tables[1:]:
        assert max(abs(tables[0][token] - table[token]) for token in table) < 0.1 * scale


def test_kv_of_8_bits_is_refused_by_name(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(ModelConfig(path=str(model_dir), device="cpu", dtype="float32"))
    assert loaded.kv_dtype("fp8") == torch.float8_e4m3fn
    latents = LayerSpec(kind="mla", layers=1, block_size=1, dtype="bf16", width=40)
    monkeypatch.setattr(type(loaded.spec), "layer_specs", lambda *_: (latents,))
    monkeypatch.setattr(loaded.device, "reads_fp8", False, raising=False)
    odd = replace(loaded, spec=replace(loaded.spec, head_dim=9))
    with pytest.raises(ConfigError) as error:
        odd.kv_dtype("fp8")
    assert re.search(
        r"^--kv-dtype fp8: cpu does not read it.*8\.9.*latents of Qwen2ForCausalLM.*heads of 9.*use auto",
        str(error.value),
    )


def test_unknown_dtype_and_missing_model(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--dtype 'float8'"):
        load(ModelConfig(path=str(model_dir), device="cpu", dtype="float8"))
    with pytest.raises(WeightsError, match="does not exist"):
        load(ModelConfig(path=str(tmp_path / "nowhere")))


def test_auto_dtype_loads(model_dir: Path) -> None:
    assert load(ModelConfig(path=str(model_dir), device="cpu")).model.dtype in (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("fast", [False, True])
def test_engines_on_different_cpus_have_the_same_kv(
    model_dir: Path, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Weights must be packed for what this CPU has; the choice alone is another CPU's.
    monkeypatch.setattr(cpu, "_native_dtype", lambda: torch.bfloat16 if fast else torch.float32)
    loaded = load(ModelConfig(path=str(model_dir), device="cpu"))
    assert loaded.model.dtype == (torch.bfloat16 if fast else torch.float32)
    assert loaded.kv_dtype("auto") == torch.float32
    assert loaded.kv_dtype("bfloat16") == torch.bfloat16
    assert load(ModelConfig(path=str(model_dir), device="cpu", dtype="bfloat16")).kv_dtype("auto") == torch.bfloat16
