"""The torch executor: a model, its KV pool and its input batch on one device, behind `interfaces.steps.Executor`.

Start has two phases, because the KV plan needs the model and the memory left beside it: `loading.load` reads the
weights and makes the scratch, then `TorchExecutor` makes the KV tensors and the persistent buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import islice
from time import perf_counter

import torch
from torch import Tensor

from ..config import KvConfig, SchedulerConfig
from ..interfaces.steps import NOTHING_DRAWN, Chunk, RowStart, StepOutput, StepPlan
from ..interfaces.transport import KvRegion
from ..kv.plan import KvPlan
from ..request import SamplingParams
from . import adjustments
from .draws import Draws
from .graphs import Graphs
from .input_batch import InputBatch, StepInputs
from .kv_cache import KvCache
from .late_masks import take
from .loading import LoadedModel, starting
from .pipeline import StepPipeline
from .pooling import Pooler, StagedVectors
from .prompt_scores import StagedScores, scores, stage_scores
from .sampler import StagedLogprobs, outputs, sample, stage_logprobs, verified
from .staging import StagingSlot

_LOG = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 60.0
_MARK = 64
"""Numbers that ranks sum where there is nothing else to wait for each other by."""
_SLOTS = 2
"""Steps in flight: one runs while the next is built and launched. More would wait behind them all the same."""


@dataclass(slots=True)
class _Staged:
    """What a step tells beside what it draws, once its work is enqueued."""

    logprobs: list[StagedLogprobs] = field(default_factory=list)
    scores: list[StagedScores] = field(default_factory=list)
    vectors: StagedVectors | None = None
    undrawn: set[int] = field(default_factory=set)
    """Rows whose masks did not come in time."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """What is needed to read a step's result."""

    draws: Draws | None
    staged: _Staged


class ModelRunner:
    """What a step does on the device: `pipeline.Runner`."""

    def __init__(
        self, loaded: LoadedModel, kv: KvCache, batch: InputBatch, graphs: Graphs, warm_up: Sequence[StepPlan]
    ) -> None:
        self._device, self._model, self._workspace = loaded.device, loaded.model, loaded.workspace
        self._adapters = loaded.adapters
        self._kv, self._batch, self._graphs = kv, batch, graphs
        self._warm_up_plans = warm_up
        self._pooler = None
        if loaded.pooling is not None:
            size = loaded.spec.hidden_size
            self._pooler = Pooler(loaded.device, loaded.pooling, max_rows=batch.max_rows, hidden_size=size)
        self._ranks = loaded.shard.collectives
        self._mark = loaded.device.zeros(_MARK, dtype=loaded.model.dtype).view(1, _MARK)
        self._drawn = loaded.device.zeros(len(batch.slots[0].drawn), dtype=torch.int64)
        self._drawn_ids = loaded.device.zeros(len(batch.slots[0].drawn), dtype=torch.int32)
        self._flat_tokens = batch.tokens.view(-1)

    def warm_up(self, slot: StagingSlot) -> None:
        """The first steps, and every graph that is captured ahead; the largest first, whose memory the others share."""
        start = perf_counter()
        for plan in self._warm_up_plans:
            self.launch(plan, slot)
            self._device.record().wait()
        first = perf_counter() - start
        for prompts, sizes in ((True, self._graphs.token_sizes), (False, self._graphs.sizes)):
            for size in reversed(sizes):
                for adapters in (False, True) if self._adapters is not None else (False,):
                    inputs = self._batch.dummies(size, slot, prompts=prompts, adapters=adapters)
                    self._enqueue(inputs, slot, _Staged())
                    self._device.record().wait()
        _LOG.info(
            "warmed up in %.2f s: the first steps %.2f s, %d captured graphs",
            perf_counter() - start,
            first,
            len(self._graphs),
        )

    def launch(self, plan: StepPlan, slot: StagingSlot) -> _Launched:
        """Describe the step and enqueue it."""
        assert not plan.copies, "copies are not in this executor"
        inputs = self._batch.build(plan, slot)
        staged = _Staged()
        self._enqueue(inputs, slot, staged)
        return _Launched(inputs.draws, staged)

    def collect(self, plan: StepPlan, launched: _Launched, slot: StagingSlot) -> StepOutput:
        """The results of a step, one RowOutput a chunk."""
        staged = launched.staged
        scored = tuple(map(scores, staged.scores))
        pooled = () if staged.vectors is None else staged.vectors.read()
        if launched.draws is None:
            return StepOutput(plan.step, (NOTHING_DRAWN,) * len(plan.chunks), scored, pooled)
        drawn = iter(outputs(launched.draws, slot, staged.logprobs[0] if staged.logprobs else None))
        rows = [
            verified(chunk.drafts, list(islice(drawn, chunk.draws)))
            if chunk.drafts
            else next(drawn)
            if chunk.draws
            else NOTHING_DRAWN
            for chunk in plan.chunks
        ]
        if staged.undrawn:
            late = (chunk.row in staged.undrawn for chunk in plan.chunks)
            rows = [NOTHING_DRAWN if missed else row for missed, row in zip(late, rows, strict=True)]
        return StepOutput(plan.step, tuple(rows), scored, pooled)

    def _enqueue(self, inputs: StepInputs, slot: StagingSlot, staged: _Staged) -> None:
        self._device.enqueue(lambda: self._run(inputs, slot, staged))

    def _run(self, inputs: StepInputs, slot: StagingSlot, staged: _Staged) -> None:
        """The device's part of a step, in its order."""
        copy = self._device.copy
        for wanted in inputs.adapters:
            assert self._adapters is not None, "this executor was made without adapters"
            self._adapters.load(wanted)
        for row, tokens in inputs.starts:
            copy(row, tokens)
        forward = inputs.forward
        if forward is None or inputs.sources is None:
            return
        copy(self._batch.uploaded[: inputs.words], slot.inputs[: inputs.words])
        for table, uploaded in inputs.tables:
            copy(table, uploaded)
        torch.index_select(self._flat_tokens, 0, inputs.sources, out=forward.token_ids)

        def layers() -> None:
            self._model.forward(forward, self._kv.layers, self._workspace, whole=inputs.read is None)

        if inputs.graph is not None:
            self._graphs.run(*inputs.graph, layers)
        else:
            layers()
        if inputs.read is not None and len(inputs.read.tokens):
            self._model.finish(inputs.read, self._kv.layers, self._workspace)
        elif inputs.read is not None and self._ranks is not None:
            # Nothing after the last layer's keys and values needs the other ranks: the end of this step on the first
            # shall be theirs, whose keys and values are sent then.
            self._ranks.sum(self._mark)
        for scored in inputs.scored:
            staged.scores.append(
                stage_scores(self._device, slot, self._logits, self._batch.tokens, scored, self._model.spec.vocab_size)
            )
        if inputs.pooled:
            assert self._pooler is not None, "a model without pooling was asked for a vector"
            staged.vectors = self._pooler.stage(self._states, inputs.pooled, slot)
        draws = inputs.draws
        if draws is None:
            return
        if draws.graph:
            self._graphs.run("draw", draws.graph, lambda: self._draw(draws, staged))
        else:
            logits = self._draw(draws, staged)
            told = stage_logprobs(self._device, slot, logits, self._drawn, draws)
            staged.logprobs.extend([] if told is None else [told])
        copy(slot.drawn[: draws.count], self._drawn[: draws.count])

    def _logits(self, rows: Tensor) -> Tensor:
        return self._model.logits(rows, self._workspace)

    def _states(self, rows: Tensor) -> Tensor:
        return self._model.states(rows, self._workspace)

    def _draw(self, draws: Draws, staged: _Staged) -> Tensor:
        """Draw, and keep what was drawn as the rows' next inputs: a step may start there before anybody has seen it."""
        logits = self._logits(draws.logit_rows)
        drawn, ids = self._drawn[: len(logits)], self._drawn_ids[: len(logits)]
        masks = draws.masks
        if draws.late_masks:
            # By now the device computes, or has computed, everything that the masks do not touch.
            late, undrawn = take([mask for _, mask in draws.late_masks])
            staged.undrawn.update(undrawn)
            masks += tuple((draw, late[mask.row]) for draw, mask in draws.late_masks if mask.row in late)
        if draws.adjustments is not None or masks:
            adjustments.apply(self._device, logits, self._batch.tokens, draws.adjustments, masks)
        sample(logits, draws, drawn)
        ids.copy_(drawn)
        self._flat_tokens.index_copy_(0, draws.targets, ids)
        return logits


class TorchExecutor:
    """`interfaces.steps.Executor` on torch. Owns the KV pool, the batch's rows and the threads that compute."""

    def __init__(self, loaded: LoadedModel, kv_plan: KvPlan, scheduler_cfg: SchedulerConfig, kv_cfg: KvConfig) -> None:
        """Returns when the first steps have run and every graph is captured. Raises ConfigError where something does
        not fit the device, EngineFailed where that is lost meanwhile."""
        device = loaded.device
        with starting(device, "what steps compute with, beside the weights,"):
            self._kv = KvCache(
                kv_plan,
                loaded.layer_specs(kv_cfg.block_size, kv_cfg.dtype),
                loaded.kv_dtype(kv_cfg.dtype),
                kv_cfg.layout,
                device,
                rank=loaded.shard.rank,
            )
            self._graphs = graphs = Graphs(
                device,
                max_rows=scheduler_cfg.max_num_seqs,
                max_tokens=scheduler_cfg.max_batched_tokens,
                max_len=kv_plan.max_model_len,
            )
            batch = InputBatch(
                device,
                graphs,
                max_rows=scheduler_cfg.max_num_seqs,
                max_tokens=scheduler_cfg.max_batched_tokens,
                max_len=kv_plan.max_model_len,
                groups=kv_plan.groups,
                slots=_SLOTS,
                adapters=loaded.adapters is not None,
                pooling=loaded.pooling,
            )
            warm_up = _warm_up_plans(scheduler_cfg, kv_plan, bool(graphs.sizes))
            self.runner = ModelRunner(loaded, self._kv, batch, graphs, warm_up)
            """What its steps do; benchmarks time it."""
            self._steps = StepPipeline(device, self.runner, batch.slots)

    @property
    def kv_cache(self) -> KvCache:
        """The pool, for tests that poison it."""
        return self._kv

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        """Queue a step. The future fails with EngineFailed once the executor is broken or closed."""
        return self._steps.submit(plan)

    def kv_region(self) -> KvRegion:
        """The pool; valid until `close`. ConfigError for a layout that cannot be transferred."""
        return self._kv.memory()

    def close(self) -> None:
        """Finish the steps that run, fail those that wait, stop the threads, free the pool and the graphs."""
        if not self._steps.close(_CLOSE_TIMEOUT_S):
            # It may still write the pool: the memory stays.
            _LOG.error("the executor's threads did not stop within %.0f s; a step is abandoned", _CLOSE_TIMEOUT_S)
            return
        self._graphs.close()
        self._kv.free()


def _warm_up_plans(scheduler: SchedulerConfig, kv_plan: KvPlan, compiles: bool) -> tuple[StepPlan, ...]:
    """Steps on rows whose tables are all null: nothing is written, every kernel is chosen and bound, and the scratch of
    a typical step is committed. Where kernels are compiled at their first use (`compiles`), also the largest step, and
    the filters that requests use most: nobody's stream shall stand still for them later. In the end all rows draw with
    them: the memory that this takes is taken, and seen, before anything is served."""
    most = min(scheduler.max_batched_tokens, kv_plan.max_model_len)
    rows = min(scheduler.max_batched_tokens, scheduler.max_num_seqs)
    drawn = SamplingParams(max_tokens=1, temperature=1.0)
    steps = [(1, min(most, 64), drawn)]
    if compiles:
        both = replace(drawn, top_k=40, top_p=0.9)
        steps += [
            (1, most, drawn),
            (1, 1, replace(drawn, top_p=0.9)),
            (1, 1, both),
            (rows, 1, replace(both, logprobs=20)),
        ]
    return tuple(
        StepPlan(
            step=-1,
            starts=tuple(
                RowStart(
                    row=row,
                    request_id="warm-up",
                    token_ids=[0] * count,
                    prompt_len=count,
                    block_ids=((),) * len(kv_plan.groups),
                    sampling=sampling,
                )
                for row in range(rows)
            ),
            grown=(),
            chunks=tuple(Chunk(row, 0, count, draws=1) for row in range(rows)),
            num_tokens=rows * count,
        )
        for rows, count, sampling in steps
    )
