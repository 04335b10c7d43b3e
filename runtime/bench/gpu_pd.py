"""Prefill on one GPU and decode on another of the same host, over HTTP, beside one engine that does both: what the
split costs the first token, whether the tokens are the same, and a mixed load (docs/benchmarks.md).

Random weights of a real architecture, greedy, no prefix cache. The first token is the one that decode streams.

    python runtime/bench/gpu_pd.py [--model qwen3-8b] [--transport nvlink] [--lens 1024,8192,32768] [--rates 3,6]
        [--gpus 0+1,1+0 --engine-flag=--tensor-parallel-size=2 --engine-flag=--kv-memory=8Gi]   engines of two ranks, on
                            the same two GPUs in other orders: each rank's KV goes to the other GPU
        [--folder FOLDER]   where the model's files are, or are made and kept
        [--device cpu --model small --transport tcp --lens 64,256 --rates 1]   a trial without a GPU
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gpu_http import FRACTION, NAME, START_S, Server, free_port, make_model, running
from gpu_table import MODELS, SMALL, say

from isthmus_runtime.commands.bench_client import BenchFailed, Seen, Target, stream

REPEATS = 7
SAME = (5, 100, 1000, 3000)
"""Lengths of prompts whose tokens are compared."""
TOKENS = 32
MIXED = (4096, 256)
"""Tokens in and out of a request of the mixed load, as the peer's was."""
PEER = {1024: (32, 76), 8192: (219, 394), 32768: (1277, 1905)}
"""vLLM 0.24.0 with Qwen3-8B's shape on two H200s: ms to the first token of a plain server, and of its split."""


def engine(name: str, role: str, gpus: str, args: argparse.Namespace, log: Path, *more: str) -> Any:
    """An engine that sees these GPUs, numbers joined by +, in this order."""
    port = free_port()
    argv = [sys.executable, "-m", "isthmus_runtime", "serve", "--role", role, "--port", str(port), "--model"]
    argv += [args.folder, "--served-model-name", NAME, "--drain-timeout", "5s", *more]
    if role != "router":
        argv += [f"--device={args.device}", f"--max-model-len={args.max_model_len}", "--no-prefix-caching"]
        argv += [f"--max-batched-tokens={args.max_batched_tokens}", "--max-num-seqs=256", "--max-waiting=4096"]
        argv += [f"--kv-memory-fraction={FRACTION}"] if args.device == "cuda" else ["--kv-memory=1Gi", "--threads=1"]
        argv += args.engine_flag
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus.replace("+", ",")}  # noqa: TID251
    return running(name, argv, port, "/ready", log / f"pd-{name}.log", START_S, environment)


def transfers(args: argparse.Namespace) -> list[str]:
    """Flags of both sides."""
    return ["--transfer-mode=direct", f"--transfer-transport={args.transport}", "--transfer-host=127.0.0.1"]


def post(server: Server, prompt: Sequence[int]) -> list[int]:
    """The tokens of one answer."""
    body = {"model": NAME, "prompt": list(prompt), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    data = json.dumps({**body, "return_token_ids": True}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/v1/completions", data)
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=120) as answer:
        return list(json.load(answer)["choices"][0]["token_ids"])


def counters(server: Server, *names: str) -> dict[str, float]:
    """Metrics by name, those with labels by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in lines
        if any(line.startswith(f"isthmus_{name}") for name in names)
        and "_bucket" not in line
        and "_created" not in line
    }


async def first_tokens(target: Target, length: int, seed: int) -> list[Seen]:
    """One after the other; the first is not counted."""
    rng = random.Random(seed)
    async with target.session() as session:
        seen = [await stream(session, target, target.prompt(rng, length), 16) for _ in range(REPEATS + 1)]
    return seen[1:]


async def mixed(target: Target, rate: float, seconds: float) -> dict[str, float]:
    """Poisson arrivals, each of MIXED tokens."""
    rng, seen, failed = random.Random(11), list[Seen](), list[str]()
    at, moment = list[float](), 0.0
    while (moment := moment + rng.expovariate(rate)) < seconds:
        at.append(moment)
    prompts = [target.prompt(rng, MIXED[0]) for _ in at]
    began = time.perf_counter()

    async def one(number: int) -> None:
        await asyncio.sleep(max(0.0, began + at[number] - time.perf_counter()))
        try:
            seen.append(await stream(session, target, prompts[number], MIXED[1]))
        except BenchFailed as error:
            failed.append(str(error))

    async with target.session() as session:
        await asyncio.gather(*map(one, range(len(at))))
    took = time.perf_counter() - began
    firsts = sorted(one.ttft_s * 1e3 for one in seen)
    gaps = sorted((b - a) * 1e3 for one in seen for a, b in pairwise(one.text_s))
    if failed:
        say(f"{len(failed)} failed: {failed[0][:300]}")
    return {
        "rate": rate, "requests": len(seen), "failed": len(failed), "out_tok_s": len(seen) * MIXED[1] / took,
        "ttft_p50_ms": at_share(firsts, 0.5), "ttft_p99_ms": at_share(firsts, 0.99),
        "itl_p50_ms": at_share(gaps, 0.5), "itl_p99_ms": at_share(gaps, 0.99),
    }  # fmt: skip


def at_share(ordered: Sequence[float], share: float) -> float:
    """A percentile."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def measure(server: Server, name: str, args: argparse.Namespace, vocab: int, engines: Sequence[Server]) -> Any:
    """Tokens, first tokens and the mixed load at one server."""
    target = Target(url=f"http://127.0.0.1:{server.port}", model=NAME, vocab_size=vocab, timeout_s=240)
    rng = random.Random(5)
    longest = max(map(int, args.lens.split(",")))
    lengths = [min(length, longest) for length in SAME]
    found: dict[str, Any] = {"tokens": [post(server, target.prompt(rng, n)) for n in lengths], "first": {}, "mixed": []}
    for length in map(int, args.lens.split(",")):
        before = [counters(one, "xfer_sent_bytes", "xfer_exposed_seconds") for one in engines[:1]]
        seen = asyncio.run(first_tokens(target, length, length))
        times = [one.ttft_s * 1e3 for one in seen]
        seconds = statistics.median(one.text_s[1] - one.text_s[0] for one in seen if len(one.text_s) > 1) * 1e3
        told = ""
        for old, one in zip(before, engines[:1], strict=True):
            new = counters(one, "xfer_sent_bytes", "xfer_exposed_seconds")
            moved = {name: new[name] - old.get(name, 0.0) for name in new}
            nbytes = sum(value for name, value in moved.items() if "bytes" in name)
            exposed = sum(value for name, value in moved.items() if "seconds_sum" in name)
            count = max(1.0, sum(value for name, value in moved.items() if "seconds_count" in name))
            told = f"; {nbytes / count / 1e6:.0f} MB a prompt, {exposed / count * 1e3:.2f} ms not hidden"
        say(
            f"{name:8} first token of {length:6}: {statistics.median(times):8.1f} ms"
            f" ({min(times):.1f} to {max(times):.1f}); then {seconds:.1f} ms to the second{told}"
        )
        found["first"][length] = times
    for rate in map(float, filter(None, args.rates.split(","))):
        result = asyncio.run(mixed(target, rate, args.seconds))
        say(f"{name:8} mixed: " + ", ".join(f"{key} {value:.1f}" for key, value in result.items()))
        found["mixed"].append(result)
    for one in engines:
        found[one.name] = counters(one, "xfer")
        say(f"{one.name}: {found[one.name]}")
    return found


def main() -> int:
    """One engine, then two and a router; 1 where tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b", choices=[*MODELS, "small"])
    parser.add_argument("--transport", default="nvlink", choices=["auto", "nvlink", "rdma", "tcp"])
    parser.add_argument("--lens", default="1024,8192,32768")
    parser.add_argument("--rates", default="3,6", help="requests a second of the mixed load; empty: none")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the mixed load")
    parser.add_argument("--parts", default="unified,split")
    parser.add_argument("--gpus", default="0,1", help="of prefill and decode; one engine alone has the first")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--max-model-len", type=int, default=33024)
    parser.add_argument("--max-batched-tokens", type=int, default=8192)
    parser.add_argument("--engine-flag", action="append", default=[], help="another flag of engines, as --flag=value")
    parser.add_argument("--folder", default="", help="of the model's files; made if it is not there")
    parser.add_argument("--out", default="", help="folder for pd.json and logs")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    config = SMALL if args.model == "small" else MODELS[args.model]
    first, second = args.gpus.split(",")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        args.folder = args.folder or str(Path(made) / NAME)
        if not (Path(args.folder) / "tokenizer.json").exists():
            Path(args.folder).mkdir(parents=True)
            make_model(config, Path(args.folder), torch.device(args.device))
            if args.device == "cuda":
                torch.cuda.empty_cache()
        log = Path(args.out or made)
        if "unified" in args.parts:
            with engine("unified", "unified", first, args, log) as one:
                say(f"unified: exec to ready {one.start_s:.1f} s")
                found["unified"] = measure(one, "unified", args, config["vocab_size"], [])
        if "split" in args.parts:
            flags = transfers(args)
            enter = stack.enter_context
            prefill: Server = enter(engine("prefill", "prefill", first, args, log, *flags))
            decode: Server = enter(engine("decode", "decode", second, args, log, *flags))
            say(f"prefill, decode: exec to ready {prefill.start_s:.1f}, {decode.start_s:.1f} s")
            peers = [f"--prefill=127.0.0.1:{prefill.port}", f"--decode=127.0.0.1:{decode.port}"]
            router: Server = enter(engine("router", "router", first, args, log, *peers))
            found["split"] = measure(router, "split", args, config["vocab_size"], [prefill, decode])
        if args.out:
            (Path(args.out) / f"pd-{args.transport}.json").write_text(json.dumps(found, indent=1))
    if len(found) < 2:
        return 0
    say(f"\n{'first token, ms':20} {'unified':>10} {'split':>10} {'cost':>8}  split / unified   vLLM's")
    for length, times in found["unified"]["first"].items():
        plain, split = statistics.median(times), statistics.median(found["split"]["first"][length])
        peer = PEER.get(length) if args.model == "qwen3-8b" else None
        beside = "" if peer is None else f"{peer[1] / peer[0]:.2f} ({peer[0]}, {peer[1]})"
        say(f"{length:<20} {plain:>10.1f} {split:>10.1f} {split - plain:>8.1f}  {split / plain:>15.3f}   {beside}")
    same = [one == two for one, two in zip(found["unified"]["tokens"], found["split"]["tokens"], strict=True)]
    say(f"tokens of {sum(same)} of {len(same)} prompts are the same")
    return int(not all(same))


if __name__ == "__main__":
    sys.exit(main())
