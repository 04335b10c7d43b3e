"""What the scheduler costs at each step: `schedule`, `complete` and `settle` with many running rows, without a model.

    python runtime/bench/scheduler.py [--rows 256] [--steps 2000]

Steps are timed one by one and the median is quoted: the machine's other load then shows in the spread, which is
printed beside it, with the load average. `make bench` runs it first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import deque

from isthmus_runtime.config import SchedulerConfig
from isthmus_runtime.engine.scheduler import Scheduler
from isthmus_runtime.interfaces.steps import NOTHING_DRAWN, RowOutput, StepOutput, StepPlan
from isthmus_runtime.kv.groups import GroupPlan
from isthmus_runtime.kv.plan import KvPlan
from isthmus_runtime.kv.pool import BlockPool
from isthmus_runtime.request import GenerateRequest, SamplingParams

BAR_MS = 0.5
BLOCK = 16
PROMPT = 512


def scheduler_with(rows: int, steps: int) -> Scheduler:
    """A scheduler with `rows` requests that run for longer than `steps` steps."""
    length = PROMPT + steps + 64
    blocks = rows * -(-length // BLOCK) + 1
    plan = KvPlan(
        num_blocks=blocks,
        usable_blocks=blocks - 1,
        block_size=BLOCK,
        bytes_per_block=1,
        max_model_len=length,
        groups=(GroupPlan(block_size=BLOCK),),
        ranks=(),
    )
    config = SchedulerConfig(max_batched_tokens=8192, max_num_seqs=rows, max_waiting=rows)
    scheduler = Scheduler(config, plan, BlockPool(blocks))
    sampling = SamplingParams(max_tokens=length, stop_token_ids=(2,))
    for number in range(rows):
        prompt = tuple((number * 31 + i * 7) % 1000 + 10 for i in range(PROMPT))
        scheduler.add(GenerateRequest(request_id=f"r{number}", prompt_token_ids=prompt, sampling=sampling), 0.0)
    return scheduler


def answer(plan: StepPlan) -> StepOutput:
    """What an executor would say."""
    return StepOutput(plan.step, tuple(RowOutput((7,)) if c.draws else NOTHING_DRAWN for c in plan.chunks))


def measure(rows: int, steps: int) -> list[tuple[float, float]]:
    """Seconds of (`schedule`, `complete`) in `steps` steps with every row running and one step in flight."""
    scheduler = scheduler_with(rows, steps)
    in_flight: deque[StepOutput] = deque()
    times: list[tuple[float, float]] = []
    while len(times) < steps:
        began = time.perf_counter()
        plan, _ = scheduler.schedule(began)
        planned = time.perf_counter()
        assert plan is not None
        in_flight.append(answer(plan))
        if len(in_flight) < 2:
            continue
        output = in_flight.popleft()
        resumed = time.perf_counter()
        scheduler.complete(output, resumed)
        scheduler.settle()
        ended = time.perf_counter()
        if len(plan.chunks) == rows == plan.num_tokens:
            times.append((planned - began, ended - resumed))
    return times


def main() -> None:
    """Print the cost of a step, and the load it was measured under."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    times = measure(args.rows, args.steps)
    both = [1e3 * (a + b) for a, b in times]
    quantiles = statistics.quantiles(both, n=20)
    schedule, complete = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    print(
        f"scheduler: {statistics.median(both):.3f} ms per step at {args.rows} running rows "
        f"(schedule {schedule:.3f}, complete {complete:.3f}; 5 % to 95 %: {quantiles[0]:.3f} to {quantiles[-1]:.3f}; "
        f"bar {BAR_MS} ms; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)"
    )


if __name__ == "__main__":
    main()
