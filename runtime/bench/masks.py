"""What structured output costs: tokens a second of 32 rows that all, half of them, or none must keep to a grammar.

    python runtime/bench/masks.py [--rows 32] [--tokens 128] [--rounds 3] [--model DIRECTORY]

One engine in this process, without HTTP. The three kinds take turns in one run, and medians over the rounds are
compared. Every row generates the same number of tokens: the grammar never ends before, the free rows may not stop.
`make bench` runs it.
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

from isthmus_runtime.request import GenerateRequest, SamplingParams, Structure

BAR = 0.95
GRAMMAR = Structure(kind="regex", text=r"([A-Z][a-z]{1,9}( [a-z]{1,9}){2,8}[.] ){60,90}")
PROMPT = 32
VOCABULARY = 49152


async def rate(engine: Engine, rows: int, masked: int, tokens: int, seed: int) -> float:
    """Tokens a second of `rows` requests, of which `masked` have a grammar."""
    rng = Random(seed)
    sampling = SamplingParams(max_tokens=tokens, temperature=1.0, seed=seed)
    requests = [
        GenerateRequest(
            request_id=f"{seed}-{number}",
            prompt_token_ids=tuple(rng.randrange(100, VOCABULARY) for _ in range(PROMPT)),
            sampling=sampling,
            structure=GRAMMAR if number % rows < masked else None,
        )
        for number in range(rows)
    ]
    began = time.perf_counter()
    counts = await asyncio.gather(*(engine.count(request) for request in requests))
    took = time.perf_counter() - began
    assert counts == [tokens] * rows, counts
    return rows * tokens / took


async def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens a second by kind, one a round."""
    kinds = {"free": 0, "half": args.rows // 2, "all": args.rows}
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    with running(args.model, max_num_seqs=args.rows) as engine:
        for masked in kinds.values():
            await rate(engine, args.rows, masked, 16, 1)
        for turn in range(args.rounds):
            for kind, masked in kinds.items():
                found[kind].append(await rate(engine, args.rows, masked, args.tokens, 10 * turn + masked))
    return found


def main() -> None:
    """Print the rates and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path("~/.cache/isthmus").expanduser()
    parser.add_argument("--model", default=str(cache / "models" / "smollm2-135m-instruct"))
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found = asyncio.run(measure(args))
    free, half, every = (statistics.median(found[kind]) for kind in ("free", "half", "all"))
    print(
        f"masks: {args.rows} rows: {free:.0f} tok/s free, {half:.0f} half of them masked ({half / free:.2f}x), "
        f"{every:.0f} all masked ({every / free:.2f}x; bar {BAR}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} "
        f"cores)"
    )


if __name__ == "__main__":
    main()
