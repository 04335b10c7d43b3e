"""What structured output costs: tokens a second of 32 rows that all, half of them, or none must keep to a grammar.

    python runtime/bench/masks.py [--rows 32] [--tokens 128] [--rounds 3] [--model DIRECTORY]

One engine in this process, without HTTP. The three kinds take turns in one run, and medians over the rounds are
compared: of tokens a second, and of CPU seconds, which a busy machine bends less. Every row generates the same number
of tokens: the grammar never ends before, the free rows may not stop. Then one stream whose JSON has long keys beside a
free one: its forced tokens are computed together. `make bench` runs it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path
from random import Random

from in_process import Engine, running

from isthmus_runtime.request import GenerateRequest, SamplingParams, Structure

BAR = 0.95
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 4, "maxLength": 24},
        "count": {"type": "integer"},
        "kind": {"enum": ["new", "used", "broken"]},
        "ready": {"type": "boolean"},
    },
    "required": ["name", "count", "kind", "ready"],
    "additionalProperties": False,
}
GRAMMAR = Structure(kind="json_schema", text=json.dumps({"type": "array", "items": ITEM, "minItems": 100}))
LONG_KEYS = {
    "type": "object",
    "properties": {
        "customer_identifier": {"type": "integer"},
        "delivery_address": {"type": "string", "maxLength": 12},
        "payment_status": {"enum": ["outstanding", "settled in full"]},
        "is_recurring": {"type": "boolean"},
    },
    "required": ["customer_identifier", "delivery_address", "payment_status", "is_recurring"],
    "additionalProperties": False,
}
FORCING = Structure(kind="json_schema", text=json.dumps({"type": "array", "items": LONG_KEYS, "minItems": 100}))
PROMPT = 32
VOCABULARY = 49152


async def rate(
    engine: Engine, rows: int, masked: int, tokens: int, seed: int, grammar: Structure = GRAMMAR
) -> tuple[float, float]:
    """Tokens a second of `rows` requests, of which `masked` have the grammar; and microseconds of CPU time a token."""
    rng = Random(seed)
    sampling = SamplingParams(max_tokens=tokens, temperature=1.0, seed=seed)
    requests = [
        GenerateRequest(
            request_id=f"{seed}-{number}",
            prompt_token_ids=tuple(rng.randrange(100, VOCABULARY) for _ in range(PROMPT)),
            sampling=sampling,
            structure=grammar if number % rows < masked else None,
        )
        for number in range(rows)
    ]
    began, used = time.perf_counter(), time.process_time()
    counts = await asyncio.gather(*(engine.count(request) for request in requests))
    took, used = time.perf_counter() - began, time.process_time() - used
    assert counts == [tokens] * rows, counts
    return rows * tokens / took, 1e6 * used / (rows * tokens)


async def measure(args: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """What `rate` found by kind, one a round."""
    kinds = {"free": 0, "half": args.rows // 2, "all": args.rows}
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    with running(args.model, max_num_seqs=args.rows) as engine:
        for masked in kinds.values():
            await rate(engine, args.rows, masked, 16, 1)
        for turn in range(args.rounds):
            for kind, masked in kinds.items():
                found[kind].append(await rate(engine, args.rows, masked, args.tokens, 10 * turn + masked))
        found["one free"], found["one forced"] = [], []
        before = engine.loop.scheduler.stats().forced
        for turn in range(args.rounds):
            found["one free"].append(await rate(engine, 1, 0, args.tokens, 500 + turn))
            found["one forced"].append(await rate(engine, 1, 1, args.tokens, 600 + turn, FORCING))
        forced = engine.loop.scheduler.stats().forced - before
        print(f"masks: one stream: {forced} of {args.rounds * args.tokens} tokens forced and computed with another")
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
    speed, cost = (
        {kind: statistics.median(one[at] for one in rounds) for kind, rounds in found.items()} for at in (0, 1)
    )
    print(
        f"masks: {args.rows} rows: {speed['free']:.0f} tok/s free, "
        f"{speed['half']:.0f} half of them masked ({speed['half'] / speed['free']:.2f}x), "
        f"{speed['all']:.0f} all masked ({speed['all'] / speed['free']:.2f}x; bar {BAR}); CPU time a token "
        f"{cost['free']:.0f} us, {cost['half'] / cost['free']:.2f}x, {cost['all'] / cost['free']:.2f}x; "
        f"one stream {speed['one forced'] / speed['one free']:.2f}x a free one where keys are long "
        f"(medians of {args.rounds} rounds; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)"
    )


if __name__ == "__main__":
    main()
