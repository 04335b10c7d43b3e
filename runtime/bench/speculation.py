"""Speculative decoding by n-grams or a draft model: one stream's tokens a second with and without it.

    python runtime/bench/speculation.py [--drafts 6] [--tokens 192] [--rounds 3] [--model DIRECTORY] [--draft DIRECTORY]

Two engines in this process, without HTTP, take turns. Text that repeats: greedy, after a prompt that repeats itself.
Text that does not: drawn at temperature 1. Both engines must generate the same tokens. Medians over the rounds are
compared, and CPU seconds, which a busy machine bends less. `make bench` runs it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from pathlib import Path
from random import Random

from in_process import Engine, running

from isthmus_runtime.request import GenerateRequest, SamplingParams

BARS = {"repeats": 1.5, "does not": 0.97}
VOCABULARY = 49152


def request(kind: str, turn: int, tokens: int) -> GenerateRequest:
    """One stream."""
    rng = Random(turn)
    once = tuple(rng.randrange(100, VOCABULARY) for _ in range(40))
    repeats = kind == "repeats"
    return GenerateRequest(
        request_id=f"{kind} {turn}",
        prompt_token_ids=4 * once if repeats else once,
        sampling=SamplingParams(max_tokens=tokens, temperature=0.0 if repeats else 1.0, seed=turn),
    )


async def run(engine: Engine, wanted: GenerateRequest) -> tuple[list[int], float, float]:
    """(tokens, tokens a second, CPU microseconds a token)."""
    began, used = time.perf_counter(), time.process_time()
    tokens = await engine.tokens(wanted)
    took, used = time.perf_counter() - began, time.process_time() - used
    return tokens, len(tokens) / took, 1e6 * used / len(tokens)


async def measure(args: argparse.Namespace) -> None:
    """Both engines, in turns; a line for each kind of text."""
    options = {"max_num_seqs": 8, "kv_bytes": 1 << 29}
    with (
        running(args.model, **options) as plain,
        running(args.model, **options, speculative_tokens=args.drafts, draft=args.draft) as fast,
    ):
        for engine in (plain, fast):
            await run(engine, request("repeats", 999, 64))
        for kind, bar in BARS.items():
            found: dict[str, list[tuple[float, float]]] = {"plain": [], "fast": []}
            stats = fast.loop.scheduler.stats()
            for turn in range(args.rounds):
                wanted = request(kind, turn, args.tokens)
                tokens, *without = await run(plain, wanted)
                same, *with_it = await run(fast, wanted)
                assert same == tokens, f"{kind} {turn}: other tokens"
                found["plain"].append((without[0], without[1]))
                found["fast"].append((with_it[0], with_it[1]))
            now = fast.loop.scheduler.stats()
            (slow, cost), (quick, less) = (
                (statistics.median(column) for column in zip(*rounds, strict=True)) for rounds in found.values()
            )
            print(
                f"speculation: text that {kind}: {slow:.1f} tok/s without, {quick:.1f} with it ({quick / slow:.2f}x; "
                f"bar {bar}); CPU time a token {less / cost:.2f}x; {now.accepted - stats.accepted} of "
                f"{now.drafted - stats.drafted} drafts kept (medians of {args.rounds} rounds; "
                f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)"
            )


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path("~/.cache/isthmus").expanduser()
    parser.add_argument("--model", default=str(cache / "models" / "smollm2-135m-instruct"))
    parser.add_argument("--draft", default="", help="a draft model; default: n-grams")
    parser.add_argument("--drafts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
