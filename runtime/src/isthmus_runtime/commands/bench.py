"""`isthmus-runtime bench`: load one OpenAI endpoint with fixed lengths and report what clients saw.

Speaks only /v1/completions with token ids, `ignore_eos` and streaming, so it measures peers in the same way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from ..errors import ConfigError
from ..sim.traces import read_trace
from .bench_client import BenchFailed, Seen, Target, replay, stream
from .bench_steps import Sweep, measure_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load: `requests` prompts of `input_len` random tokens, `output_len` tokens each, `concurrency` at once."""

    url: str
    model: str
    requests: int
    input_len: int
    output_len: int
    concurrency: int
    vocab_size: int
    seed: int
    timeout_s: float


@dataclass(slots=True, kw_only=True)
class Result:
    """What the clients saw. Times in seconds, rates in tokens per second."""

    seconds: float
    output_tokens: int
    input_tokens: int
    errors: int
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)

    def add(self, seen: Seen, input_tokens: int) -> None:
        """Count one answer."""
        self.ttft_s.append(seen.ttft_s)
        self.itl_s += [later - earlier for earlier, later in pairwise(seen.text_s)]
        self.output_tokens += seen.tokens
        self.input_tokens += input_tokens

    def summary(self) -> dict[str, float]:
        """Numbers for a table."""
        out: dict[str, float] = {
            "seconds": self.seconds,
            "output_tok_s": self.output_tokens / self.seconds,
            "total_tok_s": (self.output_tokens + self.input_tokens) / self.seconds,
            "errors": self.errors,
        }
        for name, values in (("ttft", self.ttft_s), ("itl", self.itl_s)):
            if values:
                ranked = sorted(values)
                out[f"{name}_median_s"] = statistics.median(ranked)
                out[f"{name}_p99_s"] = ranked[min(len(ranked) - 1, int(len(ranked) * 0.99))]
        return out


async def run_load(load: Load) -> Result:
    """Run one load to its end."""
    rng = random.Random(load.seed)
    target = Target(url=load.url, model=load.model, vocab_size=load.vocab_size, timeout_s=load.timeout_s)
    prompts = [target.prompt(rng, load.input_len) for _ in range(load.requests)]
    result = Result(seconds=0.0, output_tokens=0, input_tokens=0, errors=0)
    gate = asyncio.Semaphore(load.concurrency)

    async def limited(prompt: list[int]) -> None:
        async with gate:
            try:
                seen = await stream(session, target, prompt, load.output_len)
            except BenchFailed as error:
                result.errors += 1
                print(f"bench: {error}", file=sys.stderr)
            else:
                result.add(seen, len(prompt))

    async with target.session() as session:
        start = time.perf_counter()
        await asyncio.gather(*map(limited, prompts))
        result.seconds = time.perf_counter() - start
    return result


def build_bench_parser() -> argparse.ArgumentParser:
    """Flags of `isthmus-runtime bench`."""
    p = argparse.ArgumentParser(prog="isthmus-runtime bench", description="Load one OpenAI endpoint, fixed lengths.")
    p.add_argument("--url", default="http://127.0.0.1:8000", help="endpoint, without /v1")
    p.add_argument("--model", required=True, help="served model name")
    p.add_argument("--requests", type=int, default=64)
    p.add_argument("--input-len", type=int, default=256)
    p.add_argument("--output-len", type=int, default=64)
    p.add_argument("--concurrency", type=int, default=64)
    p.add_argument("--vocab-size", type=int, default=49152, help="random token ids lie in 100..vocab-size")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--timeout", type=float, default=600.0, help="seconds a request may take")
    p.add_argument("--json", action="store_true", help="print JSON only")
    other = p.add_argument_group("instead of one load")
    other.add_argument("--steps", action="store_true", help="step times for `simulate --calibrate`; needs --out")
    other.add_argument("--replay", default="", help="send a trace (JSON lines, docs/simulation.md) at its own times")
    other.add_argument("--max-model-len", type=int, default=2048, help="with --steps: of the service, tokens")
    other.add_argument("--out", default="", help="with --steps or --replay: JSON file for the results")
    return p


def bench_main(argv: Sequence[str]) -> int:
    """Run one load and print its summary; 1 when any request failed."""
    args = build_bench_parser().parse_args(argv)
    for name in ("requests", "input_len", "output_len", "concurrency"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)} must be 1 or more")
    if args.vocab_size <= 100:
        raise ConfigError(f"--vocab-size {args.vocab_size} must be above 100")
    url = args.url.rstrip("/").removesuffix("/v1")
    target = Target(url=url, model=args.model, vocab_size=args.vocab_size, timeout_s=args.timeout)
    if args.steps or args.replay:
        if bool(args.steps) == bool(args.replay) or not args.out:
            raise ConfigError("give one of --steps and --replay, together with --out for the results")
        return _steps(target, args) if args.steps else _replay(target, args)
    load = Load(
        url=url,
        model=args.model,
        requests=args.requests,
        input_len=args.input_len,
        output_len=args.output_len,
        concurrency=args.concurrency,
        vocab_size=args.vocab_size,
        seed=args.seed,
        timeout_s=args.timeout,
    )
    result = asyncio.run(run_load(load))
    summary = {k: round(v, 4) for k, v in result.summary().items()}
    if args.json:
        print(json.dumps({"load": asdict(load), "result": summary}))
    else:
        for key, value in summary.items():
            print(f"{key:>16} {value}")
    return 1 if result.errors else 0


def _steps(target: Target, args: argparse.Namespace) -> int:
    sweep = Sweep(seed=args.seed, max_model_len=args.max_model_len)
    steps = asyncio.run(measure_steps(target, sweep))
    Path(args.out).write_text(json.dumps({"target": asdict(target), "sweep": asdict(sweep), "steps": steps}, indent=1))
    return 0


def _replay(target: Target, args: argparse.Namespace) -> int:
    trace = read_trace(args.replay)
    answers = asyncio.run(replay(target, trace, args.seed))
    body = [{"at_s": r.at_s, "ttft_s": a.ttft_s, "itl_s": a.itl_s} for r, a in zip(trace, answers, strict=True)]
    Path(args.out).write_text(json.dumps({"target": asdict(target), "requests": body}, indent=1))
    return 0
