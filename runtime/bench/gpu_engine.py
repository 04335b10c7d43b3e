"""An engine with random weights in the benchmark's own process: loop, scheduler and executor, without HTTP."""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from isthmus_runtime.checkpoints.random import RandomTensors
from isthmus_runtime.config import KvConfig, ModelConfig, SchedulerConfig
from isthmus_runtime.engine.exchange import Reply
from isthmus_runtime.engine.loop import STEPS_IN_FLIGHT, EngineLoop
from isthmus_runtime.engine.scheduler import Scheduler
from isthmus_runtime.executor.device.select import open_device
from isthmus_runtime.executor.loading import LoadedModel, load
from isthmus_runtime.executor.model_runner import TorchExecutor
from isthmus_runtime.executor.ranks import LeadingExecutor, Ranks
from isthmus_runtime.kv.plan import KvPlan, KvPlanInput, plan
from isthmus_runtime.kv.pool import BlockPool
from isthmus_runtime.models.base import ModelSpec
from isthmus_runtime.models.shard import WHOLE, Slice
from isthmus_runtime.request import FinishReason, GenerateRequest, SamplingParams, TokenChunk

DEADLINE_S = 300.0


def open_model(
    config: dict[str, Any],
    scheduler: SchedulerConfig,
    *,
    device: str,
    dtype: str,
    seed: int,
    on: str,
    quantization: str = "auto",
    deterministic: bool = False,
    ranks: Ranks | None = None,
) -> LoadedModel:
    """Random weights for `config`, generated on the device `on` (`cpu`: alike everywhere). `ranks`: this process is one
    of several, and takes its part of them."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))

        def source(spec: ModelSpec, where: torch.device) -> Any:
            made = torch.device("cpu") if on == "cpu" else where
            kind = torch.bfloat16 if config["torch_dtype"] == "bfloat16" else torch.float32
            weights = RandomTensors(spec.tensor_shapes(), device=made, dtype=kind, seed=seed)
            return weights if made == where else _Moved(weights, where)

        model = ModelConfig(
            path=folder, device=device, dtype=dtype, quantization=quantization, deterministic=deterministic
        )
        shard = WHOLE if ranks is None else ranks.shard
        own = open_device(device, index=shard.rank, deterministic=deterministic)
        return load(model, scheduler, device=own, source=source, shard=shard)


@dataclass
class _Moved:
    source: RandomTensors
    device: torch.device

    def take(self, *parts: str | Slice) -> torch.Tensor:
        return self.source.take(*parts).to(self.device)


@dataclass
class Run:
    """One load that ran to its end."""

    seconds: float
    first_s: list[float]
    steps: int
    decode_ms: float
    """Median time between two answers of the engine, once prompts are computed."""
    out_tokens: int
    tokens: list[list[int]]


def pool_plan(loaded: LoadedModel, scheduler: SchedulerConfig, kv: KvConfig, ranks: Ranks | None) -> KvPlan:
    """Of the pool, as all ranks make it."""
    specs = loaded.layer_specs(kv.block_size, kv.dtype)
    available = kv.memory_bytes or loaded.device.kv_bytes(kv.memory_fraction, loaded.draw_bytes(scheduler))
    every = (available,) if ranks is None else ranks.each(available)
    return plan(
        KvPlanInput(
            ranks=(specs,) * len(every),
            available_bytes=every,
            max_model_len=scheduler.max_model_len or loaded.spec.max_position,
            auto_fit=True,
            max_num_batched_tokens=scheduler.max_batched_tokens,
            batches_in_flight=STEPS_IN_FLIGHT,
        )
    )


class Bench:
    """An engine without HTTP: loop, scheduler, executor."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        scheduler: SchedulerConfig,
        kv: KvConfig,
        prefix_caching: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """`ranks`: this process is the first of several; the others run `follow`."""
        self.plan = pool_plan(loaded, scheduler, kv, ranks)
        local = TorchExecutor(loaded, self.plan, scheduler, kv)
        self.executor = local if ranks is None else LeadingExecutor(local, ranks.plans)
        self.overdrawn = 0
        """Bytes of the device that are taken beyond the fraction."""
        if kv.memory_bytes is None:
            # Of an engine that serves, the pool would be made smaller then (`commands.ranks.with_pool`).
            self.overdrawn = loaded.device.overdrawn(kv.memory_fraction)
        groups = len(self.plan.groups)
        pool = BlockPool(self.plan.num_blocks, num_groups=groups, prefix_caching=prefix_caching)
        planner = Scheduler(scheduler, self.plan, pool, late_masks=ranks is None)
        runner = local.runner
        self.host = {
            "schedule": _timed(planner, "schedule"),
            "complete": _timed(planner, "complete"),
            "launch": _timed(runner, "launch"),
            "collect": _timed(runner, "collect"),
        }
        """Milliseconds of the host, by call, of the last run."""
        self._loop = EngineLoop(planner, self.executor, self._sink)
        self._changed = threading.Condition()
        self._tokens: dict[str, list[int]] = {}
        self._first: dict[str, float] = {}
        self._answers: list[float] = []
        self._open: set[str] = set()
        self._errors: list[str] = []
        self._number = 0
        self._loop.start()

    def run(self, prompts: Sequence[Sequence[int]], output_len: int) -> Run:
        """Send all prompts at once; returns when all have all their tokens."""
        names = []
        for _ in prompts:
            self._number += 1
            names.append(f"r{self._number}")
        with self._changed:
            self._open = set(names)
            self._tokens = {name: [] for name in names}
            self._first = {}
            self._answers = []
            for times in self.host.values():
                times.clear()
        sampling = SamplingParams(max_tokens=output_len, temperature=0.0)
        steps, begin = self._loop.steps, time.perf_counter()
        for name, prompt in zip(names, prompts, strict=True):
            self._loop.generate(
                GenerateRequest(
                    request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling, timeout_s=DEADLINE_S
                )
            )
        with self._changed:
            if not self._changed.wait_for(lambda: not self._open or self._errors, DEADLINE_S):
                raise TimeoutError(f"{len(self._open)} requests had not ended after {DEADLINE_S:.0f} s")
            if self._errors:
                raise RuntimeError(self._errors[0])
        seconds = time.perf_counter() - begin
        tokens = [self._tokens[name] for name in names]
        assert all(len(one) == output_len for one in tokens)
        begun = max(self._first.values())
        gaps = [later - earlier for earlier, later in pairwise(t for t in self._answers if t >= begun)]
        return Run(
            seconds=seconds,
            first_s=sorted(self._first[name] - begin for name in names),
            steps=self._loop.steps - steps,
            decode_ms=statistics.median(gaps) * 1e3 if gaps else 0.0,
            out_tokens=sum(map(len, tokens)),
            tokens=tokens,
        )

    def close(self) -> None:
        """End the loop, give the memory back."""
        self._loop.stop()
        self.executor.close()

    def _sink(self, replies: Sequence[tuple[str, Reply]]) -> None:
        now = time.perf_counter()
        ended = False
        self._answers.append(now)
        for name, reply in replies:
            if not isinstance(reply, TokenChunk):
                continue
            if reply.token_ids:
                self._first.setdefault(name, now)
                self._tokens[name].extend(reply.token_ids)
            if reply.finish_reason is not None:
                ended = True
                if reply.finish_reason is not FinishReason.LENGTH:
                    self._errors.append(f"{name} ended with {reply.finish_reason}: {reply.error}")
                self._open.discard(name)
        if ended:
            with self._changed:
                self._changed.notify_all()


def _timed(owner: Any, name: str) -> list[float]:
    """Note how long each call of a method takes; the list that gets the milliseconds."""
    method, times = getattr(owner, name), list[float]()

    def timed(*args: Any) -> Any:
        begin = time.perf_counter()
        try:
            return method(*args)
        finally:
            times.append((time.perf_counter() - begin) * 1e3)

    setattr(owner, name, timed)
    return times
