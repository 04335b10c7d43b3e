"""One rank of a test: runs a tiny model's executor, leading or following. Arguments: rank, model folder, meeting file,
blocks, a file for the tokens of rank 0, and the folder of an adapter, nothing, or `stop`: rank 1 stands still from its
first step on."""

from __future__ import annotations

import json
import os
import signal
import sys
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from typing import NoReturn

from torch import distributed

from isthmus_runtime.config import KvConfig, ModelConfig, SchedulerConfig
from isthmus_runtime.errors import ConfigError
from isthmus_runtime.executor.adapters import AdapterSlots
from isthmus_runtime.executor.loading import load
from isthmus_runtime.executor.model_runner import TorchExecutor
from isthmus_runtime.executor.ranks import LeadingAdapters, LeadingExecutor, follow
from isthmus_runtime.interfaces.steps import AdapterSlot, Chunk, RowStart, StepOutput, StepPlan
from isthmus_runtime.kv.plan import KvPlanInput, plan
from isthmus_runtime.lora_config import LoraConfig
from isthmus_runtime.request import SamplingParams

PROMPT = [5, 9, 2, 61, 33, 8]
BLOCKS = ((1, 2, 3, 4),)
COUNT = 12


def adapted(digest: str) -> list[StepPlan]:
    """The same with an adapter."""
    first, *others = steps()
    slot = AdapterSlot(1, "one", digest)
    return [replace(first, starts=(replace(first.starts[0], adapter=1),), adapters=(slot,)), *others]


def steps() -> list[StepPlan]:
    """A prompt and its continuation, one row."""
    start = RowStart(0, "r", PROMPT, len(PROMPT), BLOCKS, SamplingParams(max_tokens=COUNT, temperature=0.0))
    plans = [StepPlan(0, (start,), (), (Chunk(0, 0, len(PROMPT), 1),), len(PROMPT))]
    return plans + [StepPlan(n, (), (), (Chunk(0, len(PROMPT) + n - 1, 1, 1),), 1) for n in range(1, COUNT)]


def executor(folder: str, blocks: int) -> tuple[TorchExecutor, AdapterSlots]:
    """In float32, on one thread."""
    scheduler = SchedulerConfig(max_batched_tokens=16, max_num_seqs=2)
    loaded = load(
        ModelConfig(path=folder, device="cpu", dtype="float32", threads=1), scheduler, lora=LoraConfig(max_loras=1)
    )
    assert loaded.adapters is not None
    kv_plan = plan(
        KvPlanInput(
            ranks=(loaded.layer_specs(8, "auto"),),
            available_bytes=(1 << 33,),
            max_model_len=32,
            max_num_batched_tokens=16,
            num_blocks_override=blocks,
        )
    )
    return TorchExecutor(loaded, kv_plan, scheduler, KvConfig(block_size=8)), loaded.adapters


class _StandsStill(TorchExecutor):
    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        os.kill(os.getpid(), signal.SIGSTOP)
        return super().submit(plan)


def with_a_rank_that_stands_still(local: TorchExecutor, rank: int) -> NoReturn:
    """The first rank prints what its second step ends with."""
    if rank:
        local.__class__ = _StandsStill
        follow(local)
    else:
        leader = LeadingExecutor(local, patience_s=1.0)
        first, second, *_ = steps()
        leader.submit(first)
        print(leader.submit(second).exception(180), flush=True)
    # What was sent and not taken would be waited for.
    os._exit(0)


def main() -> int:
    rank, folder, meeting, blocks, out = int(sys.argv[1]), *sys.argv[2:4], int(sys.argv[4]), sys.argv[5]
    local, slots = executor(folder, blocks)
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=timedelta(seconds=180)
    )
    try:
        if sys.argv[6] == "stop":
            with_a_rank_that_stands_still(local, rank)
        elif rank:
            follow(local, adapters=slots)
            local.close()
        else:
            leader = LeadingExecutor(local)
            plans = steps()
            if adapter := sys.argv[6]:
                holder = LeadingAdapters(slots, leader)
                # One that goes again, at once after its last step, and comes back.
                found = holder.read(adapter)
                holder.keep(found)
                leader.submit(adapted(found.digest)[0]).result(180)
                holder.drop(found.digest)
                holder.keep(holder.read(adapter))
                plans = adapted(found.digest)
            tokens = [leader.submit(step).result(180).rows[0].tokens[0] for step in plans]
            leader.close()
            with open(out, "w", encoding="utf-8") as file:
                json.dump(tokens, file)
    except ConfigError as error:
        print(error)
        return 2
    finally:
        distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
