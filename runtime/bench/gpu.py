"""`make bench-gpu`: the table of the GPU's bars, through the engine loop, the scheduler and the executor.

Random weights of real architectures, made on the GPU; greedy, fixed lengths, no prefix cache, no HTTP. Beside each row
stand what vLLM 0.24.0 reached on one H200 (docs/benchmarks.md) and the computed limit.

    python runtime/bench/gpu.py [--models qwen3-8b,qwen3-30b-a3b] [--rows single,decode] [--quick] [--out FOLDER]
    python runtime/bench/gpu.py --parity     tokens of the GPU equal the CPU's, float32, random weights
    python runtime/bench/gpu.py --profile    where the time of a step goes, by kernel
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()

import torch  # noqa: E402 - what importing costs is part of a start
from gpu_engine import Bench, open_model  # noqa: E402
from gpu_table import MODELS, ROWS, SMALL, START, Row, say  # noqa: E402

from isthmus_runtime.config import KvConfig, SchedulerConfig  # noqa: E402
from isthmus_runtime.executor.device.cuda import CudaDevice  # noqa: E402


@dataclass
class Report:
    """What was measured, as text and as JSON."""

    lines: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def line(self, text: str) -> None:
        say(text)
        self.lines.append(text)

    def write(self, folder: str) -> None:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / "bench-gpu.txt").write_text("\n".join(self.lines) + "\n")
            (Path(folder) / "bench-gpu.json").write_text(json.dumps(self.data, indent=1))


def bench_model(name: str, args: argparse.Namespace, report: Report, began: float) -> None:
    """All rows of one model."""
    scheduler = SchedulerConfig(
        max_model_len=args.max_model_len,
        max_batched_tokens=args.max_batched_tokens,
        max_num_seqs=256,
        max_waiting=4096,
    )
    loaded = open_model(
        MODELS[name],
        scheduler,
        device=args.device,
        dtype="auto",
        seed=0,
        on="device",
        quantization=args.quantization,
        deterministic=args.deterministic == "on",
    )
    say(f"bench: {name} loaded {time.perf_counter() - began:.1f} s after its start")
    bench = Bench(
        loaded,
        scheduler=scheduler,
        kv=KvConfig(memory_fraction=args.kv_memory_fraction, dtype=args.kv_dtype),
        prefix_caching=args.prefix_caching == "on",
    )
    ready = time.perf_counter() - began
    peer, bar = START[name]
    report.line(f"\n{name}: {bench.plan.num_blocks} KV blocks, max_model_len {bench.plan.max_model_len}")
    report.line(f"{'row':32} {'ours':>10} {'peer':>9} {'limit':>9} {'bar':>9}  ours/peer  to bar")
    report.line(
        f"{'start to ready, s':32} {ready:>10.1f} {peer:>9.0f} {'':>9} {bar:>9.0f}  {peer / ready:>8.2f}x"
        f"  {'met' if ready <= bar else 'short'}"
    )
    report.data[name] = {"start_s": ready, "rows": {}}
    rng = random.Random(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(1000, 150000) for _ in range(length)] for _ in range(count)]

    try:
        for count, length, output in () if args.rows == "none" else ((8, 128, 16), (256, 128, 8), (2, 4096, 2)):
            bench.run(prompts(count, length), output)
        say(f"bench: {name} ready and warm after {time.perf_counter() - began:.1f} s")
        for row in ROWS:
            if args.rows and row.name not in args.rows.split(","):
                continue
            try:
                _row(row, name, bench, prompts, args, report)
            except Exception as error:
                report.line(f"{row.title:32} FAILED: {type(error).__name__}: {error}")
                report.data[name]["rows"][row.name] = {"error": str(error)}
                traceback.print_exc()
                if "failed" in str(error):
                    break  # the engine is gone
            report.write(args.out)
        if args.profile:
            report.line(profile(bench, prompts))
    finally:
        bench.close()
        report.write(args.out)


def _row(
    row: Row,
    model: str,
    bench: Bench,
    prompts: Callable[[int, int], list[list[int]]],
    args: argparse.Namespace,
    report: Report,
) -> None:
    output = min(row.output_len, 64) if args.quick else row.output_len
    values, runs = [], []
    for _ in range(1 if args.quick else row.repeats):
        run = bench.run(prompts(row.requests, row.input_len), output)
        runs.append(run)
        if row.unit == "ms":
            values.append(run.first_s[0] * 1e3)
        else:
            counted = run.out_tokens + (row.requests * row.input_len if row.unit.startswith("total") else 0)
            values.append(counted / run.seconds)
    value = statistics.median(values)
    peer, limit, bar = row.known[model]
    last = runs[-1]
    report.line(
        f"{row.title + ', ' + row.unit:32} {value:>10.1f} {peer:>9g} {limit or float('nan'):>9g} {bar:>9g}"
        f"  {row.better(value, peer):>8.2f}x  {'met' if row.better(value, bar) >= 1 else 'short'}"
        f"  ({last.steps} steps; decode {last.decode_ms:.2f} ms; first token {last.first_s[0] * 1e3:.1f} ms)"
        + ("  [quick: fewer tokens than the peer]" if output != row.output_len else "")
    )
    host = {name: statistics.median(times) for name, times in bench.host.items() if times}
    report.line(" " * 34 + "host, median ms a step: " + ", ".join(f"{name} {ms:.2f}" for name, ms in host.items()))
    report.data[model]["rows"][row.name] = {
        "host_ms": host,
        "values": values, "unit": row.unit, "peer": peer, "limit": limit, "bar": bar,
        "steps": [r.steps for r in runs], "decode_ms": [r.decode_ms for r in runs],
        "seconds": [r.seconds for r in runs], "output_len": output,
    }  # fmt: skip


def profile(bench: Bench, prompts: Callable[[int, int], list[list[int]]]) -> str:
    """Kernels by time: decode of one row, decode of 256 rows, prefill of 8192 tokens."""
    texts = []
    for title, count, length, output in (("single", 1, 128, 24), ("256 rows", 256, 128, 24), ("prefill", 2, 8192, 1)):
        inputs = prompts(count, length)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            bench.run(inputs, output)
        table = found.key_averages().table(sort_by="cuda_time_total", row_limit=22, max_name_column_width=70)
        texts.append(f"\nprofile: {title}, {count} x {length}/{output}\n{table}")
    return "\n".join(texts)


def parity(args: argparse.Namespace, report: Report) -> bool:
    """Greedy tokens of the GPU and of the CPU, float32, one model of random weights, mixed lengths."""
    rng = random.Random(7)
    prompts = [[rng.randrange(49152) for _ in range(n)] for n in (1, 7, 16, 33, 120, 400)]
    scheduler = SchedulerConfig(max_model_len=1024, max_batched_tokens=256, max_num_seqs=8)
    found: dict[str, list[list[int]]] = {}
    for device in ("cpu", args.device):
        loaded = open_model(SMALL, scheduler, device=device, dtype="float32", seed=3, on="cpu")
        bench = Bench(loaded, scheduler=scheduler, kv=KvConfig(memory_bytes=512 << 20))
        found[device] = bench.run(prompts, 48).tokens
        bench.close()
    pairs = list(zip(found["cpu"], found[args.device], strict=True))
    same = sum(a == b for a, b in pairs)
    kinds = len({token for a, _ in pairs for token in a})
    first = [next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None) for a, b in pairs]
    report.line(
        f"parity, float32: {same} of {len(pairs)} requests have equal tokens ({kinds} different tokens; "
        f"first difference at {first})"
    )
    report.data["parity"] = {"equal": same, "of": len(pairs), "first_difference": first}
    return same == len(pairs)


def main() -> int:
    """Run what was asked for; 1 when parity failed or nothing could run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3-8b")
    parser.add_argument("--rows", default="", help="comma-separated names, or none (start only); default: all")
    parser.add_argument("--quick", action="store_true", help="one repeat, at most 64 tokens out")
    parser.add_argument("--parity", action="store_true", help="first compare the GPU's tokens with the CPU's")
    parser.add_argument("--profile", action="store_true", help="last a table of kernels by time")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--quantization", default="auto", choices=["auto", "fp8"], help="fp8: 8-bit products")
    parser.add_argument("--deterministic", default="off", choices=["on", "off"], help="as the engine's flag")
    parser.add_argument(
        "--prefix-caching", default="off", choices=["on", "off"], help="on: what it costs; nothing hits"
    )
    parser.add_argument("--kv-dtype", default="auto", choices=["auto", "bfloat16", "fp8"], help="of the KV pool")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--max-batched-tokens", type=int, default=8192)
    parser.add_argument("--kv-memory-fraction", type=float, default=0.9)
    parser.add_argument("--no-prompt-graphs", action="store_true", help="launch steps with prompts one by one")
    parser.add_argument("--out", default="", help="folder for bench-gpu.txt and bench-gpu.json")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)7.0f ms %(name)s: %(message)s")
    if args.no_prompt_graphs:
        CudaDevice.graph_tokens = lambda self, max_tokens: ()  # type: ignore[method-assign]
    report, ok = Report(), True
    if args.device == "cuda":
        report.line(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    if args.parity:
        try:
            ok = parity(args, report)
        except Exception as error:
            ok = False
            report.line(f"parity FAILED: {type(error).__name__}: {error}")
            traceback.print_exc()
    for number, name in enumerate(filter(None, args.models.split(","))):
        try:
            # What importing took belongs to the first start.
            bench_model(name, args, report, time.perf_counter() if number else STARTED)
        except Exception as error:
            ok = False
            report.line(f"{name} FAILED: {type(error).__name__}: {error}")
            traceback.print_exc()
        # The next model needs this one's memory.
        gc.collect()
    report.write(args.out)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
