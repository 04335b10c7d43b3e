"""`make bench-gpu`: the table of the GPU's bars, through the engine loop, the scheduler and the executor.

Random weights of real architectures, made on the GPU; greedy, fixed lengths, no prefix cache, no HTTP. Beside each row
stand the peer and the computed limit. Where vLLM can be imported (or by what `--peer` names) the peer's row is run on
the same card, after ours, in a process of its own. Otherwise it is a recorded figure, and marked.

    python runtime/bench/gpu.py [--models qwen3-8b,gpt-oss-20b] [--rows single,decode] [--quick] [--out FOLDER]
    python runtime/bench/gpu.py --peer PYTHON   the interpreter that has vLLM, or folders of it for PYTHONPATH
    python runtime/bench/gpu.py --parity     tokens of the GPU equal the CPU's, float32, random weights
    python runtime/bench/gpu.py --ops        last a roofline line for each op (kernels/bench/gpu_ops.py)
    python runtime/bench/gpu.py --profile    where the time of a step goes, by kernel
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()

import torch  # noqa: E402 - what importing costs is part of a start
from gpu_engine import Bench, open_model  # noqa: E402
from gpu_peer import Peer, find_peer, measure, table  # noqa: E402
from gpu_table import MODELS, ROWS, SMALL, WARM_UP, Row, prompts, say, shortened  # noqa: E402

from isthmus_runtime.config import KvConfig, SchedulerConfig  # noqa: E402
from isthmus_runtime.executor.device.cuda import CudaDevice  # noqa: E402

_OPS = Path(__file__).parents[2] / "kernels/bench/gpu_ops.py"
_OPS_S = 900.0


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
    report.line(f"\n{name}: {bench.plan.num_blocks} KV blocks, max_model_len {bench.plan.max_model_len}")
    report.line(f"{'start to ready, s':32} {ready:>10.1f}")
    if bench.overdrawn:
        report.line(f"{bench.overdrawn / 2**30:.2f} GiB more are taken than --kv-memory-fraction allows")
    report.data[name] = {"start_s": ready, "overdrawn_bytes": bench.overdrawn, "rows": {}}
    rng = random.Random(0)
    try:
        for count, length, output in () if args.rows == "none" else WARM_UP:
            bench.run(prompts(rng, count, length, name), output)
        say(f"bench: {name} ready and warm after {time.perf_counter() - began:.1f} s")
        for row in ROWS:
            if args.rows and row.name not in args.rows.split(","):
                continue
            try:
                _row(row, name, bench, rng, args.quick, report)
            except Exception as error:
                report.line(f"{row.title:32} FAILED: {type(error).__name__}: {error}")
                report.data[name]["rows"][row.name] = {"error": str(error)}
                traceback.print_exc()
                if "failed" in str(error):
                    break  # the engine is gone
            report.write(args.out)
        if args.profile:
            report.line(profile(bench, rng, name))
    finally:
        bench.close()
        report.write(args.out)


def _row(row: Row, model: str, bench: Bench, rng: random.Random, quick: bool, report: Report) -> None:
    output, repeats = shortened(row, quick)
    values, runs = [], []
    for _ in range(repeats):
        run = bench.run(prompts(rng, row.requests, row.input_len, model), output)
        runs.append(run)
        values.append(row.value(run.first_s[0] if row.unit == "ms" else run.seconds, output))
    last = runs[-1]
    report.line(
        f"{row.title + ', ' + row.unit:32} {statistics.median(values):>10.1f}"
        f"  ({last.steps} steps; decode {last.decode_ms:.2f} ms; first token {last.first_s[0] * 1e3:.1f} ms)"
    )
    host = {name: statistics.median(times) for name, times in bench.host.items() if times}
    report.line(" " * 34 + "host, median ms a step: " + ", ".join(f"{name} {ms:.2f}" for name, ms in host.items()))
    report.data[model]["rows"][row.name] = {
        "host_ms": host, "values": values, "unit": row.unit, "steps": [r.steps for r in runs],
        "decode_ms": [r.decode_ms for r in runs], "seconds": [r.seconds for r in runs], "output_len": output,
    }  # fmt: skip


def compare(name: str, args: argparse.Namespace, peer: Peer | None, report: Report) -> None:
    """The table of a model that ran: ours beside the peer, which runs now if it is there."""
    # The peer, and the next model, need this one's memory.
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        say(f"bench: ours of {name} has ended, {(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB are still taken")
    flags = [f"--rows={args.rows}", f"--max-model-len={args.max_model_len}", f"--kv-dtype={args.kv_dtype}"]
    flags += [f"--memory-fraction={args.kv_memory_fraction}", *(["--quick"] if args.quick else [])]
    flags += [] if args.quantization == "auto" else [f"--quantization={args.quantization}"]
    figures = measure(peer, name, flags, args.peer_timeout)
    report.line("")
    for line in table(report.data[name], figures):
        report.line(line)
    report.write(args.out)


def profile(bench: Bench, rng: random.Random, model: str) -> str:
    """Kernels by time: decode of one row, decode of 256 rows, prefill of 8192 tokens."""
    texts = []
    for title, count, length, output in (("single", 1, 128, 24), ("256 rows", 256, 128, 24), ("prefill", 2, 8192, 1)):
        inputs = prompts(rng, count, length, model)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            bench.run(inputs, output)
        kernels = found.key_averages().table(sort_by="cuda_time_total", row_limit=22, max_name_column_width=70)
        texts.append(f"\nprofile: {title}, {count} x {length}/{output}\n{kernels}")
    return "\n".join(texts)


def rooflines(report: Report) -> bool:
    """Each op beside the ceiling that it has on this card, in a process of its own. False when that failed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "ops.json"
        argv = [sys.executable, "-u", str(_OPS), "--json", str(out)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        late = threading.Timer(_OPS_S, process.kill)
        late.start()
        try:
            assert process.stdout is not None
            report.line("\nops, and the ceilings measured beside them")
            for text in process.stdout:
                report.line(text.rstrip("\n"))
            status = process.wait()
        finally:
            late.cancel()
            process.kill()
            process.wait()
        if status:
            report.line(f"ops FAILED: {_OPS.name} ended with {status} (within {_OPS_S:.0f} s it has to end)")
        else:
            report.data["ops"] = json.loads(out.read_text())
    return status == 0


def parity(args: argparse.Namespace, report: Report) -> bool:
    """Greedy tokens of the GPU and of the CPU, float32, one model of random weights, mixed lengths."""
    rng = random.Random(7)
    inputs = [[rng.randrange(49152) for _ in range(n)] for n in (1, 7, 16, 33, 120, 400)]
    scheduler = SchedulerConfig(max_model_len=1024, max_batched_tokens=256, max_num_seqs=8)
    found: dict[str, list[list[int]]] = {}
    for device in ("cpu", args.device):
        loaded = open_model(SMALL, scheduler, device=device, dtype="float32", seed=3, on="cpu")
        bench = Bench(loaded, scheduler=scheduler, kv=KvConfig(memory_bytes=512 << 20))
        found[device] = bench.run(inputs, 48).tokens
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
    parser.add_argument("--ops", action=argparse.BooleanOptionalAction, default=False, help="last the ops' rooflines")
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
    parser.add_argument("--peer", default="auto", help="auto, none, an interpreter or PYTHONPATH that has vLLM")
    parser.add_argument("--peer-timeout", type=float, default=600.0, help="seconds for its rows of one model")
    parser.add_argument("--out", default="", help="folder for bench-gpu.txt and bench-gpu.json")
    args = parser.parse_args()
    # Who ends this ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        peer = find_peer(args.peer)
    except ValueError as error:
        parser.error(str(error))
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
            compare(name, args, peer, report)
        except Exception as error:
            ok = False
            report.line(f"{name} FAILED: {type(error).__name__}: {error}")
            traceback.print_exc()
            # The next model needs this one's memory.
            gc.collect()
    if args.ops:
        ok = rooflines(report) and ok
    report.write(args.out)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
