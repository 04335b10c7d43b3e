"""Tiny models, the imported SmolLM2, and a small driver that stands in for the scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from real_models import gemma3_270m, qwen25_coder_05b, smollm2_135m_instruct

from isthmus_runtime.config import KvConfig, ModelConfig, SchedulerConfig
from isthmus_runtime.executor.device.base import Device
from isthmus_runtime.executor.loading import LoadedModel, load
from isthmus_runtime.executor.model_runner import TorchExecutor
from isthmus_runtime.interfaces.steps import Chunk, RowBlocks, RowStart, StepOutput, StepPlan
from isthmus_runtime.kv.plan import KvPlan, KvPlanInput, plan
from isthmus_runtime.lora_config import LoraConfig
from isthmus_runtime.models.shard import WHOLE, Shard
from isthmus_runtime.request import SamplingParams, TokenLogprobs

DEADLINE_S = 120.0


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a model directory."""
    return smollm2_135m_instruct()


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M as a model directory."""
    return gemma3_270m()


@pytest.fixture(scope="session")
def qwen25_coder() -> Path:
    """Qwen 2.5 Coder 0.5B Instruct as a model directory, where it is installed."""
    found = qwen25_coder_05b()
    if found is None:
        pytest.skip("the packages of Qwen 2.5 Coder are not installed (480 MB): make test-models")
    return found


@dataclass(slots=True)
class Job:
    """One request of the driver, and its state."""

    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=1, temperature=0.0))
    generated: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    row: int = -1
    computed: int = 0
    known: int = 0
    """Tokens that exist when the submitted steps are done."""
    blocks: list[list[int]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.generated) >= self.max_tokens


class Driver:
    """Chunked prefill, decode, preemption and window eviction over an executor, one random choice after another.

    It owns block ids the way the engine does; freed blocks are filled with NaN when `poison` (then one step is in
    flight at a time, since the pool is written from here). With `ahead`, steps are submitted before the results of
    the last one are read.
    """

    def __init__(
        self,
        executor: TorchExecutor,
        kv_plan: KvPlan,
        *,
        max_rows: int,
        budget: int,
        seed: int,
        poison: bool = True,
        ahead: bool = False,
        preempt: float = 0.05,
    ) -> None:
        assert not (poison and ahead)
        self.executor, self.plan = executor, kv_plan
        self.budget, self.poison, self.ahead, self.preempt = budget, poison, ahead, preempt
        self.rng = random.Random(seed)
        self.free = list(range(1, kv_plan.num_blocks))
        self.rng.shuffle(self.free)
        self.rows = list(range(max_rows))
        self.step = 0
        self.released: list[int] = []
        if poison:
            executor.kv_cache.poison()

    def run(self, jobs: Sequence[Job]) -> list[list[int]]:
        """All jobs to their end; their generated tokens."""
        waiting, running = list(jobs), list[Job]()
        pending: tuple[Future[StepOutput], list[Job]] | None = None
        while waiting or running or pending:
            if not self.ahead and running and self.rng.random() < self.preempt:
                victim = self.rng.choice(running)
                running.remove(victim)
                self._release(victim)
                waiting.append(victim)
            starts: list[RowStart] = []
            while waiting and self.rows and self.rng.random() < 0.8:
                running.append(self._start(waiting.pop(0)))
            started = [job for job in running if job.computed == 0]
            grown: list[RowBlocks] = []
            chunks, sampling = self._chunks(running, grown)
            for job in started:
                if any(chunk.row == job.row for chunk in chunks):
                    grown = [blocks for blocks in grown if blocks.row != job.row]
                    starts.append(self._row_start(job))
            submitted: tuple[Future[StepOutput], list[Job]] | None = None
            if chunks:
                total = sum(chunk.num_tokens for chunk in chunks)
                step = StepPlan(self.step, tuple(starts), tuple(grown), tuple(chunks), total)
                self.step += 1
                submitted = (self.executor.submit(step), sampling)
            for result in (pending, None if self.ahead else submitted):
                if result is not None:
                    self._collect(result)
            pending = submitted if self.ahead else None
            for job in [job for job in running if job.known == len(job.prompt) + job.max_tokens and job.done]:
                running.remove(job)
                self._release(job)
        return [job.generated for job in jobs]

    def _start(self, job: Job) -> Job:
        job.row = self.rows.pop(self.rng.randrange(len(self.rows)))
        job.computed, job.known = 0, len(job.prompt) + len(job.generated)
        job.blocks = [[] for _ in self.plan.groups]
        return job

    def _row_start(self, job: Job) -> RowStart:
        return RowStart(
            job.row,
            "job",
            [*job.prompt, *job.generated],
            len(job.prompt),
            tuple(tuple(ids) for ids in job.blocks),
            job.sampling,
        )

    def _chunks(self, running: list[Job], grown: list[RowBlocks]) -> tuple[list[Chunk], list[Job]]:
        left, chunks, sampling = self.budget, list[Chunk](), list[Job]()
        for job in self.rng.sample(running, len(running)):
            end = len(job.prompt) + job.max_tokens
            todo = min(job.known, end - 1) - job.computed
            if todo <= 0 or left == 0:
                continue
            count = self.rng.randint(1, min(todo, left))
            self._grow(job, count, grown)
            draws = 1 if job.computed + count == job.known else 0
            chunks.append(Chunk(job.row, job.computed, count, draws))
            job.computed += count
            left -= count
            if draws:
                job.known += 1
                sampling.append(job)
        return chunks, sampling

    def _grow(self, job: Job, count: int, grown: list[RowBlocks]) -> None:
        for number, group in enumerate(self.plan.groups):
            ids = job.blocks[number]
            if group.window is not None:
                # The next query looks back at window - 1 positions; whole blocks before that are given back.
                passed = max(0, job.computed - group.window + 1) // group.block_size
                for index in range(min(passed, len(ids))):
                    if ids[index]:
                        self._give_back([ids[index]])
                        ids[index] = 0
                        grown.append(RowBlocks(job.row, number, index, (0,)))
            needed = -(-(job.computed + count) // group.block_size)
            new = tuple(self.free.pop() for _ in range(needed - len(ids)))
            if new:
                grown.append(RowBlocks(job.row, number, len(ids), new))
                ids.extend(new)

    def _release(self, job: Job) -> None:
        self._give_back([block for ids in job.blocks for block in ids if block])
        self.rows.append(job.row)

    def _give_back(self, ids: list[int]) -> None:
        if self.poison:
            self.executor.kv_cache.poison(ids)
        # A step in flight may still read them; they return once it is done.
        (self.released if self.ahead else self.free).extend(ids)

    def _collect(self, result: tuple[Future[StepOutput], list[Job]]) -> None:
        output = result[0].result(DEADLINE_S)
        drawn = [row for row in output.rows if row.tokens]
        for job, row in zip(result[1], drawn, strict=True):
            job.generated.extend(row.tokens)
            job.logprobs.append(row.logprobs[0] if row.logprobs else None)
        self.free.extend(self.released)
        self.released.clear()


@dataclass(frozen=True, slots=True)
class Engine:
    """An executor with what it was built from."""

    loaded: LoadedModel
    plan: KvPlan
    executor: TorchExecutor
    max_rows: int
    budget: int

    def driver(self, seed: int, **options: Any) -> Driver:
        return Driver(self.executor, self.plan, max_rows=self.max_rows, budget=self.budget, seed=seed, **options)


@pytest.fixture
def start_engine() -> Iterator[Callable[..., Engine]]:
    """`start_engine(directory, ...)`: an executor in float32 with a small pool, on the CPU if no device is given;
    closed after the test."""
    engines: list[Engine] = []

    def start(
        directory: Path | str,
        *,
        block_size: int = 16,
        num_blocks: int = 512,
        max_model_len: int = 256,
        max_rows: int = 8,
        budget: int = 64,
        layout: str = "block-major",
        dtype: str = "float32",
        kv_dtype: str = "auto",
        device: Device | None = None,
        quantization: str = "auto",
        lora: LoraConfig | None = None,
        shard: Shard = WHOLE,
    ) -> Engine:
        scheduler = SchedulerConfig(max_batched_tokens=budget, max_num_seqs=max_rows, max_model_len=max_model_len)
        model = ModelConfig(path=str(directory), device="cpu", dtype=dtype, quantization=quantization, threads=2)
        loaded = load(model, scheduler, device=device, shard=shard, lora=lora)
        specs = loaded.layer_specs(block_size, kv_dtype)
        kv_plan = plan(
            KvPlanInput(
                ranks=(specs,),
                available_bytes=(1 << 33,),
                max_model_len=max_model_len,
                max_num_batched_tokens=budget,
                num_blocks_override=num_blocks,
                batches_in_flight=2,
            )
        )
        executor = TorchExecutor(
            loaded,
            kv_plan,
            scheduler,
            KvConfig(block_size=block_size, layout=layout, dtype=kv_dtype),
        )
        engines.append(Engine(loaded, kv_plan, executor, max_rows, budget))
        return engines[-1]

    yield start
    for engine in engines:
        engine.executor.close()


@pytest.fixture
def job() -> type[Job]:
    """The driver's request."""
    return Job


@pytest.fixture
def driver() -> type[Driver]:
    """The driver itself, for executors that `start_engine` does not make."""
    return Driver
