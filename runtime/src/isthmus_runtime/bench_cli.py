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

import aiohttp

from .errors import ConfigError


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
    stream: bool = True


@dataclass(slots=True, kw_only=True)
class Result:
    """What the clients saw. Times in seconds, rates in tokens per second."""

    seconds: float
    output_tokens: int
    input_tokens: int
    errors: int
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)

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


async def _one(session: aiohttp.ClientSession, load: Load, prompt: list[int], result: Result) -> None:
    body = {
        "model": load.model,
        "prompt": prompt,
        "max_tokens": load.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": load.stream,
        "stream_options": {"include_usage": True},
    }
    start = last = time.perf_counter()
    tokens = 0
    async with session.post(f"{load.url}/v1/completions", json=body) as response:
        if response.status != 200:
            result.errors += 1
            print(f"bench: HTTP {response.status}: {(await response.text())[:200]}", file=sys.stderr)
            return
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                result.errors += 1
                print(f"bench: error in the stream: {event['error']}", file=sys.stderr)
                return
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            if event.get("choices"):
                now = time.perf_counter()
                (result.ttft_s if last == start else result.itl_s).append(now - last)
                last = now
    result.output_tokens += tokens
    result.input_tokens += len(prompt)


async def run_load(load: Load) -> Result:
    """Run one load to its end."""
    rng = random.Random(load.seed)
    prompts = [[rng.randrange(100, load.vocab_size) for _ in range(load.input_len)] for _ in range(load.requests)]
    result = Result(seconds=0.0, output_tokens=0, input_tokens=0, errors=0)
    gate = asyncio.Semaphore(load.concurrency)

    async def limited(prompt: list[int]) -> None:
        async with gate:
            try:
                await _one(session, load, prompt, result)
            except (aiohttp.ClientError, TimeoutError) as error:
                result.errors += 1
                print(f"bench: {load.url}: {type(error).__name__}: {error}", file=sys.stderr)

    timeout = aiohttp.ClientTimeout(total=load.timeout_s)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
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
    return p


def bench_main(argv: Sequence[str]) -> int:
    """Run one load and print its summary; 1 when any request failed."""
    args = build_bench_parser().parse_args(argv)
    for name in ("requests", "input_len", "output_len", "concurrency"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)} must be 1 or more")
    if args.vocab_size <= 100:
        raise ConfigError(f"--vocab-size {args.vocab_size} must be above 100")
    load = Load(
        url=args.url.rstrip("/").removesuffix("/v1"),
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
