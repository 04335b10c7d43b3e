"""An engine in the benchmark's own process: the real loop, scheduler and executor, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from isthmus_runtime.commands.draft_model import load_drafts
from isthmus_runtime.config import KvConfig, ModelConfig, SchedulerConfig
from isthmus_runtime.engine.backend import EngineBackend
from isthmus_runtime.engine.local import LocalEngine
from isthmus_runtime.engine.loop import STEPS_IN_FLIGHT, EngineLoop
from isthmus_runtime.engine.scheduler import Scheduler
from isthmus_runtime.engine.streams import Streams
from isthmus_runtime.executor.loading import load
from isthmus_runtime.executor.model_runner import TorchExecutor
from isthmus_runtime.kv.plan import KvPlanInput, plan
from isthmus_runtime.kv.pool import BlockPool
from isthmus_runtime.openai.tokenizer import Tokenizer
from isthmus_runtime.request import GenerateRequest
from isthmus_runtime.structured.grammars import Grammars


class Engine:
    """What a benchmark asks."""

    def __init__(self, backend: EngineBackend, loop: EngineLoop) -> None:
        self.loop = loop
        self._backend = backend

    async def tokens(self, request: GenerateRequest) -> list[int]:
        """Everything that the request generates."""
        return [token async for chunk in self._backend.generate(request) for token in chunk.token_ids]

    async def count(self, request: GenerateRequest) -> int:
        """How much it generates."""
        return len(await self.tokens(request))


@contextmanager
def running(
    model: str,
    *,
    max_num_seqs: int,
    dtype: str = "auto",
    max_model_len: int = 2048,
    kv_bytes: int = 1 << 30,
    speculative_tokens: int = 0,
    draft: str = "",
) -> Iterator[Engine]:
    """A unified engine without prefix caching; must be entered inside a running event loop.

    `draft`: directory of a draft model; empty: drafts come from a request's own text.
    """
    kv_config = KvConfig()
    described = ModelConfig(path=model, device="cpu", dtype=dtype)
    drafts = (
        load_drafts(Path(draft), described, block_size=kv_config.block_size, max_model_len=max_model_len)
        if draft
        else None
    )
    draft_model = None if drafts is None else drafts.model
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_model_len=max_model_len, speculative_tokens=speculative_tokens
    )
    loaded = load(described, config)
    kv = plan(
        KvPlanInput(
            ranks=(loaded.layer_specs(kv_config.block_size, kv_config.dtype),),
            available_bytes=(kv_bytes,),
            max_model_len=max_model_len,
            max_num_batched_tokens=config.max_batched_tokens,
            batches_in_flight=STEPS_IN_FLIGHT,
        )
    )
    executor = TorchExecutor(loaded, kv, config, kv_config)
    pool = BlockPool(kv.num_blocks, num_groups=len(kv.groups), prefix_caching=False)
    streams = Streams(asyncio.get_running_loop())
    scheduler = Scheduler(config, kv, pool, late_masks=True, draft_model=draft_model)
    loop = EngineLoop(scheduler, executor, streams.sink, draft_model=draft_model)
    grammars = cache(
        lambda: Grammars.load(
            model, eos_token_ids=Tokenizer.load(model).eos_token_ids, vocab_size=loaded.spec.vocab_size
        )
    )
    loop.start()
    try:
        yield Engine(
            EngineBackend(
                LocalEngine(loop, streams.sink, grammars=grammars), streams, vocab_size=loaded.spec.vocab_size
            ),
            loop,
        )
    finally:
        loop.stop()
        executor.close()
        if drafts is not None:
            drafts.executor.close()
