"""A device that fails. At the start whoever starts the engine is told in a line; in mid-run every request ends with an
error, once, and the engine says why."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from safetensors.torch import save_file
from tiny_config import SMALLEST

from isthmus_runtime.checkpoints.random import RandomTensors
from isthmus_runtime.config import ModelConfig, SchedulerConfig
from isthmus_runtime.engine.exchange import Reply
from isthmus_runtime.engine.loop import EngineLoop
from isthmus_runtime.engine.scheduler import Scheduler
from isthmus_runtime.errors import ConfigError, EngineFailed
from isthmus_runtime.executor.loading import load
from isthmus_runtime.kv.pool import BlockPool
from isthmus_runtime.models.registry import read_model_spec
from isthmus_runtime.request import FinishReason, GenerateRequest, SamplingParams, TokenChunk

DEADLINE_S = 60.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of random weights."""
    (tmp_path / "config.json").write_text(json.dumps(SMALLEST))
    shapes = read_model_spec(tmp_path).tensor_shapes()
    source = RandomTensors(shapes, device=torch.device("cpu"), dtype=torch.float32, seed=1)
    save_file({name: source.take(name) for name in shapes}, tmp_path / "model.safetensors")
    return tmp_path


class NoRoom(FakeDevice):
    """Out of memory when buffers are made, or when a graph is captured."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self._at = at

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        if self._at == "zeros":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().zeros(*shape, dtype=dtype)

    def capture(self, body: Callable[[], None], memory: tuple[int, int]) -> Callable[[], None]:
        if self._at == "capture":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().capture(body, memory)


def test_weights_that_do_not_fit_are_told_before_serving(model: Path) -> None:
    def source(*_: object) -> RandomTensors:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    with pytest.raises(ConfigError, match=r"does not fit: the fake device: .*allocate 9 GiB"):
        load(ModelConfig(path=str(model)), device=FakeDevice(), source=source)


@pytest.mark.parametrize("at", ["zeros", "capture"])
def test_what_does_not_fit_beside_the_weights_is_told_before_serving(
    at: str, model: Path, start_engine: Callable[..., Any]
) -> None:
    """In a line, as all that is wrong with a configuration."""
    with pytest.raises(ConfigError, match=r"beside the weights, does not fit: the fake device: .*allocate 2 GiB"):
        start_engine(model, device=NoRoom(at))


def test_a_card_that_is_lost_at_the_start_is_told(model: Path, start_engine: Callable[..., Any]) -> None:
    device = FakeDevice()
    device.fail_with = torch.AcceleratorError("CUDA error: GPU is lost")
    with pytest.raises(EngineFailed, match="did not start: the fake device: CUDA error: GPU is lost"):
        start_engine(model, device=device)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("GPU is lost"), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")],
    ids=["lost", "out of memory"],
)
def test_every_request_ends_and_new_ones_are_refused(
    error: Exception, model: Path, start_engine: Callable[..., Any]
) -> None:
    device = FakeDevice()
    engine = start_engine(model, device=device)
    ends: dict[str, TokenChunk] = {}
    counts: Counter[str] = Counter()
    changed = threading.Condition()

    def sink(replies: Sequence[tuple[str, Reply]]) -> None:
        with changed:
            for name, chunk in replies:
                assert isinstance(chunk, TokenChunk)
                counts["tokens"] += len(chunk.token_ids)
                if chunk.finish_reason is not None:
                    counts[name] += 1
                    ends[name] = chunk
            if counts["tokens"] > 20:  # said here, while the engine waits: later, some may have come to their end
                device.fail_with = error
            changed.notify_all()

    pool = BlockPool(engine.plan.num_blocks, num_groups=1, prefix_caching=False)
    scheduler = Scheduler(SchedulerConfig(max_batched_tokens=64, max_num_seqs=8), engine.plan, pool)
    loop = EngineLoop(scheduler, engine.executor, sink)
    loop.start()

    def generate(name: str) -> None:
        sampling = SamplingParams(max_tokens=200, temperature=0.0)
        loop.generate(GenerateRequest(request_id=name, prompt_token_ids=(1, 2, 3), sampling=sampling))

    for number in range(12):
        generate(f"r{number}")
    with changed:
        assert changed.wait_for(lambda: len(ends) == 12, DEADLINE_S), sorted(ends)
    generate("late")
    with changed:
        assert changed.wait_for(lambda: "late" in ends, DEADLINE_S)
    loop.stop()
    for name, chunk in ends.items():
        assert counts[name] == 1 and chunk.finish_reason is FinishReason.ERROR, (name, chunk)
        assert isinstance(chunk.error, EngineFailed) and f"the fake device: {error}" in str(chunk.error)
    assert "must be restarted" in loop.failure
