"""What a long prompt and cancelled prompts cost others, on a real service over HTTP.

    python runtime/bench/gaps.py [--rounds 3] [--json FILE]

1. Beside a stream a prompt of 2,000 tokens arrives: the longest gap between two tokens of the stream.
2. 40 prompts of 900 tokens are sent and cancelled half a second later: how long a one-token request takes then.
3. Prompts of 1,500 tokens alone, at once, one token each: prompt tokens a second.

One unified engine without a router, prefix caching off. Quoted are the worst of the rounds for 1 and 2, the median for
3. `make bench` runs it after the scheduler's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

from run import Service, engine

from isthmus_runtime.commands.bench_client import Target, stream

GAP_BAR_S = 0.25
ANSWER_BAR_S = 0.5
LONG, STREAMED = 2000, 160
CANCELLED, CANCELLED_LEN, CANCEL_AFTER_S = 40, 900, 0.5
BATCH, BATCH_LEN = 8, 1500
VOCABULARY = 49152


@dataclass(frozen=True, slots=True)
class Round:
    """One measurement of everything."""

    gap_s: float
    alone_s: float
    """The longest gap of the same stream before the prompt came."""
    long_ttft_s: float
    """Of the prompt beside the stream."""
    answer_s: float
    prefill_tok_s: float


async def beside_a_stream(target: Target, rng: Random) -> tuple[float, float, float]:
    """(longest gap with the prompt, longest before it, time to the prompt's first token)."""
    async with target.session() as session:
        flowing = asyncio.Event()
        seen = 0

        def text() -> None:
            nonlocal seen
            seen += 1
            if seen == 30:
                flowing.set()

        task = asyncio.create_task(stream(session, target, target.prompt(rng, 20), STREAMED, on_text=text))
        await asyncio.wait_for(flowing.wait(), target.timeout_s)
        long = await stream(session, target, target.prompt(rng, LONG), 1)
        times = (await task).text_s
    assert len(times) > 31
    if times[-1] < long.last_s:
        raise SystemExit("bench: the stream ended before the prompt's first token; the gap is not the longest there is")
    before = max(b - a for a, b in pairwise(times[:30]))
    return max(b - a for a, b in pairwise(times[29:])), before, long.ttft_s


async def after_cancelling(target: Target, rng: Random) -> float:
    """Seconds that a one-token request takes once the others were cancelled."""
    async with target.session() as session:
        prompts = [target.prompt(rng, CANCELLED_LEN) for _ in range(CANCELLED)]
        tasks = [asyncio.create_task(stream(session, target, prompt, 50)) for prompt in prompts]
        await asyncio.sleep(CANCEL_AFTER_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        answer = await stream(session, target, target.prompt(rng, 1), 1)
    return answer.last_s - answer.sent_s


async def alone(target: Target, rng: Random) -> float:
    """Prompt tokens a second with nothing else to do."""
    async with target.session() as session:
        prompts = [target.prompt(rng, BATCH_LEN) for _ in range(BATCH)]
        seen = await asyncio.gather(*(stream(session, target, prompt, 1) for prompt in prompts))
    return BATCH * BATCH_LEN / (max(s.last_s for s in seen) - min(s.sent_s for s in seen))


async def measure(service: Service, number: int) -> Round:
    """One round."""
    rng = Random(number)
    target = Target(url=f"http://127.0.0.1:{service.port}", model=service.model, vocab_size=VOCABULARY)
    gap_s, before_s, ttft_s = await beside_a_stream(target, rng)
    answer_s = await after_cancelling(target, rng)
    return Round(gap_s, before_s, ttft_s, answer_s, await alone(target, rng))


def report(rounds: Sequence[Round]) -> str:
    """Two lines for people."""
    gap, answer = max(r.gap_s for r in rounds), max(r.answer_s for r in rounds)
    speed = statistics.median(r.prefill_tok_s for r in rounds)
    return (
        f"gaps: a prompt of {LONG} tokens beside a stream: longest gap {1e3 * gap:.0f} ms (bar {1e3 * GAP_BAR_S:.0f}; "
        f"before it {1e3 * max(r.alone_s for r in rounds):.0f}), its own first token after "
        f"{statistics.median(r.long_ttft_s for r in rounds):.2f} s\n"
        f"gaps: one token after {CANCELLED} cancelled prompts of {CANCELLED_LEN}: {1e3 * answer:.0f} ms "
        f"(bar {1e3 * ANSWER_BAR_S:.0f}); prompts alone: {speed:.0f} tok/s "
        f"(worst of {len(rounds)}, medians of speeds; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)"
    )


def main() -> int:
    """Start the engine, measure, stop it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path("~/.cache/isthmus").expanduser()
    parser.add_argument("--model", default=str(cache / "models" / "smollm2-135m-instruct"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", default="", help="file for the numbers")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        service = engine(args.model)
        try:
            service.start(Path(folder) / "engine.log")
            rounds = [asyncio.run(measure(service, number)) for number in range(args.rounds)]
        finally:
            service.stop()
    print(report(rounds))
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(r) for r in rounds], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
