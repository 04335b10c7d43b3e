"""The torch executor: one worker thread that runs steps in the order of submission.

Start has two phases, because the KV plan needs the model and the memory left beside it: `load` reads the weights,
then `TorchExecutor` makes the KV tensors and the persistent buffers.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter

import torch

from ..checkpoints.safetensors import Checkpoint
from ..config import KvConfig, ModelConfig, SchedulerConfig
from ..errors import ConfigError, EngineFailed
from ..interfaces.steps import NOTHING_DRAWN, Chunk, RowOutput, RowStart, StepOutput, StepPlan
from ..interfaces.transport import KvRegion
from ..kv.groups import LayerSpec
from ..kv.plan import KvPlan
from ..models.base import Model, ModelSpec
from ..models.registry import read_model_spec
from ..request import SamplingParams, TokenLogprobs
from . import compute
from .input_batch import InputBatch
from .kv_cache import KvCache
from .replay import Replay
from .sampler import sample

_LOG = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with its weights in memory, before there is a KV pool."""

    spec: ModelSpec
    model: Model
    threads: int
    kv_auto: torch.dtype
    """The pool's element type where none is asked for."""

    def kv_dtype(self, kv_dtype: str) -> torch.dtype:
        """The pool's element type for `--kv-dtype`."""
        if kv_dtype == "auto":
            return self.kv_auto
        if kv_dtype not in compute.DTYPES:
            raise ConfigError(f"--kv-dtype {kv_dtype!r} is not supported; known: auto, {', '.join(compute.DTYPES)}")
        return compute.DTYPES[kv_dtype]

    def layer_specs(self, block_size: int, kv_dtype: str) -> tuple[LayerSpec, ...]:
        """What `kv.plan` needs to know about the layers."""
        return self.spec.layer_specs(block_size, compute.KV_NAMES[self.kv_dtype(kv_dtype)])

    def free_memory_bytes(self) -> int:
        """Memory left for the KV pool, now that the weights are loaded."""
        return compute.free_memory_bytes()


def load(config: ModelConfig) -> LoadedModel:
    """Read, check and pack the weights of `config.path`. Raises WeightsError or ConfigError."""
    start = perf_counter()
    spec = read_model_spec(config.path)
    threads = compute.usable_threads(config.threads)
    torch.set_num_threads(threads)
    dtype = compute.choose_dtype(config.dtype)
    with torch.inference_mode(), Checkpoint(config.path, spec.tensor_shapes()) as checkpoint:
        model = spec.build(checkpoint, dtype)
    _LOG.info(
        "loaded %s from %s: %.0f MB of weights, %s, %d threads, %.2f s",
        spec.architecture,
        config.path,
        model.weight_bytes / 1e6,
        dtype,
        threads,
        perf_counter() - start,
    )
    # A compute dtype that was asked for is the same in every engine of a service. One that the CPU decided need not
    # be, and prefill and decode must agree on their KV.
    kv_auto = torch.float32 if config.dtype == "auto" else dtype
    return LoadedModel(spec=spec, model=model, threads=threads, kv_auto=kv_auto)


class TorchExecutor:
    """`interfaces.Executor` on torch. Owns the KV pool, the batch's rows and the thread that computes."""

    def __init__(self, loaded: LoadedModel, kv_plan: KvPlan, scheduler_cfg: SchedulerConfig, kv_cfg: KvConfig) -> None:
        self._loaded = loaded
        self._max_tokens = scheduler_cfg.max_batched_tokens
        self._kv = KvCache(
            kv_plan,
            loaded.layer_specs(kv_cfg.block_size, kv_cfg.dtype),
            loaded.kv_dtype(kv_cfg.dtype),
            kv_cfg.layout,
        )
        self._batch = InputBatch(
            max_rows=scheduler_cfg.max_num_seqs,
            max_tokens=self._max_tokens,
            max_len=kv_plan.max_model_len,
            groups=kv_plan.groups,
        )
        self._workspace = loaded.model.workspace(self._max_tokens, kv_plan.max_model_len)
        self._replay = Replay()
        self._changed = threading.Condition()
        self._queue: deque[tuple[StepPlan, Future[StepOutput]]] = deque()
        self._broken = ""
        self._closed = False
        warm = self._warm_up_plan(len(kv_plan.groups), kv_plan.max_model_len)
        self._thread = threading.Thread(target=self._work, name="executor", daemon=True)
        self._thread.start()
        self.submit(warm).result()

    @property
    def kv_cache(self) -> KvCache:
        """The pool, for tests that poison it."""
        return self._kv

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        """Queue a step. The future fails with EngineFailed once the executor is broken or closed."""
        future: Future[StepOutput] = Future()
        future.set_running_or_notify_cancel()
        with self._changed:
            refusal = self._broken or ("the executor is closed" if self._closed else "")
            if not refusal:
                self._queue.append((plan, future))
                self._changed.notify()
        if refusal:
            future.set_exception(EngineFailed(f"step {plan.step} was not run: {refusal}"))
        return future

    def kv_region(self) -> KvRegion:
        """The pool; valid until `close`. ConfigError for a layout that cannot be transferred."""
        return self._kv.memory()

    def close(self) -> None:
        """Finish the step that runs, fail those that wait, stop the thread, free the pool."""
        with self._changed:
            self._closed = True
            waiting = list(self._queue)
            self._queue.clear()
            self._changed.notify()
        for plan, future in waiting:
            future.set_exception(EngineFailed(f"step {plan.step} was not run: the executor is closed"))
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            # It may still write the pool: the memory stays.
            _LOG.error("the executor's thread did not stop within %.0f s; its step is abandoned", _CLOSE_TIMEOUT_S)
            return
        self._kv.free()

    def _work(self) -> None:
        # OpenMP keeps the number of threads per calling thread.
        torch.set_num_threads(self._loaded.threads)
        with torch.inference_mode():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._queue or self._closed)
                    if self._closed:
                        return
                    plan, future = self._queue.popleft()
                try:
                    output = self._step(plan)
                except Exception as e:
                    self._fail(plan, future, e)
                    return
                future.set_result(output)

    def _fail(self, plan: StepPlan, future: Future[StepOutput], error: Exception) -> None:
        _LOG.error("step %d failed; the executor stops", plan.step, exc_info=error)
        reason = f"step {plan.step} failed: {type(error).__name__}: {error}"
        with self._changed:
            self._broken = reason
            waiting = list(self._queue)
            self._queue.clear()
        future.set_exception(EngineFailed(reason))
        for later, waiter in waiting:
            waiter.set_exception(EngineFailed(f"step {later.step} was not run: {reason}"))

    def _step(self, plan: StepPlan) -> StepOutput:
        assert not (plan.copies or plan.adapters or plan.masks), "copies, adapters and masks are not in this executor"
        assert not any(chunk.drafts for chunk in plan.chunks), "drafts are not in this executor"
        if not plan.chunks:
            self._batch.update(plan)
            return StepOutput(plan.step, ())
        batch, drawn = self._batch.apply(plan)
        model = self._loaded.model
        if batch.max_query_len == 1:
            # One token a request: everything the model touches lies where it lay in the last step of this size.
            self._replay.run(plan.num_tokens, lambda: model.forward(batch, self._kv.layers, self._workspace))
        else:
            model.forward(batch, self._kv.layers, self._workspace)
        if not len(drawn.rows):
            return StepOutput(plan.step, (NOTHING_DRAWN,) * len(plan.chunks))
        logits = model.logits(batch.logit_rows, self._workspace)
        token_ids, logprobs = sample(logits, drawn, self._batch)
        self._batch.store(drawn, token_ids)
        outputs = iter(_outputs(token_ids.tolist(), logprobs))
        return StepOutput(plan.step, tuple(next(outputs) if c.draws else NOTHING_DRAWN for c in plan.chunks))

    def _warm_up_plan(self, num_groups: int, max_len: int) -> StepPlan:
        """A step on row 0 whose table is all null: nothing is written, every kernel is chosen and bound, and the
        scratch of a typical step is committed."""
        count = min(self._max_tokens, max_len, 64)
        start = RowStart(
            row=0,
            request_id="warm-up",
            token_ids=[0] * count,
            prompt_len=count,
            block_ids=((),) * num_groups,
            sampling=SamplingParams(max_tokens=1, temperature=1.0),
        )
        return StepPlan(step=-1, starts=(start,), grown=(), chunks=(Chunk(0, 0, count, draws=1),), num_tokens=count)


def _outputs(token_ids: list[int], logprobs: tuple[TokenLogprobs | None, ...]) -> list[RowOutput]:
    if not logprobs:
        return [RowOutput((token,)) for token in token_ids]
    return [RowOutput((t,), () if p is None else (p,)) for t, p in zip(token_ids, logprobs, strict=True)]
