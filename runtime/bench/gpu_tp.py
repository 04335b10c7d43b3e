"""One model over several GPUs of a host (tensor parallelism), through the engine loop, without HTTP: the rows of the
peer's table in docs/benchmarks.md, by number of ranks, and what more ranks gain.

Random weights, bf16, greedy, fixed lengths, no prefix cache. Each rank is a process, as in an engine that serves.

    python runtime/bench/gpu_tp.py [--model qwen3-32b] [--ranks 1,2] [--rows single,ttft8k] [--out JSON]
    python runtime/bench/gpu_tp.py --parity   float32, a small model: the tokens of one rank and of several
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()

import in_ranks  # noqa: E402
import torch  # noqa: E402 - what importing costs is part of a start
from gpu_engine import Bench, open_model, pool_plan  # noqa: E402
from gpu_table import MODELS, Row, prompts, say  # noqa: E402

from isthmus_runtime.config import KvConfig, SchedulerConfig, apply_native_environment  # noqa: E402
from isthmus_runtime.executor.model_runner import TorchExecutor  # noqa: E402
from isthmus_runtime.executor.ranks import follow, join  # noqa: E402

LIMIT_S = 400.0
"""For the ranks of one size, from their start to their end."""
QWEN3_32B = {
    **MODELS["qwen3-8b"],
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
}
PARITY = {
    **MODELS["qwen3-8b"],
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "torch_dtype": "float32",
}
BY_NAME = {**MODELS, "qwen3-32b": QWEN3_32B, "parity": PARITY}
ROWS = (
    Row("single", "single stream 128/256", 1, 128, 256, "out tok/s", {}),
    Row("ttft1k", "time to first token, 1024 in", 1, 1024, 1, "ms", {}, 5),
    Row("ttft8k", "time to first token, 8192 in", 1, 8192, 1, "ms", {}, 3),
    Row("prefill", "prefill 16 x 4096", 16, 4096, 1, "total tok/s", {}),
    Row("decode128", "128 x 128/256", 128, 128, 256, "out tok/s", {}),
)
PEER = {
    "qwen3-32b": {
        "single": (54.3, 90.4), "decode128": (4260, 6940), "prefill": (9650, 17200), "ttft8k": (913, 502),
    }
}  # fmt: skip
"""vLLM 0.24.0 with one rank and with two, on H200s (runtime/bench/LOG.md)."""


def rank_main(args: argparse.Namespace) -> None:
    """One rank; the first prints its rows, and its last line is JSON."""
    # As an engine that serves: they are on one host.
    apply_native_environment({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"})
    small = args.model == "parity"
    scheduler = SchedulerConfig(
        max_model_len=1024 if small else 16384,
        max_batched_tokens=256 if small else 8192,
        max_num_seqs=8 if small else 256,
        max_waiting=4096,
    )
    kv = KvConfig(memory_bytes=256 << 20) if small else KvConfig(memory_fraction=0.9)
    device = torch.device(args.device, args.rank if args.device == "cuda" else None)
    if args.device == "cuda":
        torch.cuda.set_device(device)
    ranks = None
    if args.of > 1:
        ranks = join(args.rank, args.of, args.meeting, device, 120.0, peer_sums=args.sums != "nccl")
        say(f"rank {args.rank} sums by {ranks.sums}")
    dtype = BY_NAME[args.model]["torch_dtype"]
    loaded = open_model(
        BY_NAME[args.model], scheduler, device=args.device, dtype=dtype, seed=0,
        on="cpu" if small else "device", ranks=ranks,
    )  # fmt: skip
    if args.rank:
        assert ranks is not None
        executor = TorchExecutor(loaded, pool_plan(loaded, scheduler, kv, ranks), scheduler, kv)
        follow(executor, ranks.plans)
        executor.close()
        return
    bench = Bench(loaded, scheduler=scheduler, kv=kv, ranks=ranks)
    start = time.perf_counter() - STARTED
    say(f"{args.of} ranks: start to ready {start:.1f} s, {bench.plan.num_blocks} KV blocks")
    found: dict[str, Any] = {"ranks": args.of, "start_s": start, "blocks": bench.plan.num_blocks, "rows": {}}
    rng = random.Random(0)
    if small:
        inputs = [[rng.randrange(4096) for _ in range(n)] for n in (1, 7, 16, 33, 120, 400)]
        found["tokens"] = bench.run(inputs, 48).tokens
    else:
        for count, length, output in ((8, 128, 16), (128, 128, 8), (2, 8192, 1)):
            bench.run(prompts(rng, count, length), output)
    for row in () if small else ROWS:
        if args.rows and row.name not in args.rows.split(","):
            continue
        runs = [bench.run(prompts(rng, row.requests, row.input_len), row.output_len) for _ in range(row.repeats)]
        values = [row.value(r.first_s[0] if row.unit == "ms" else r.seconds, row.output_len) for r in runs]
        host = {name: statistics.median(times) for name, times in bench.host.items() if times}
        found["rows"][row.name] = {"values": values, "decode_ms": [r.decode_ms for r in runs], "host_ms": host}
        say(
            f"{args.of} ranks: {row.title + ', ' + row.unit:34} {statistics.median(values):>10.1f}"
            f"  (decode {runs[-1].decode_ms:.2f} ms; host "
            + ", ".join(f"{name} {ms:.2f}" for name, ms in host.items())
            + ")"
        )
    bench.close()
    print(json.dumps(found), flush=True)


def run(args: argparse.Namespace, model: str, size: int) -> dict[str, Any]:
    """What the first of `size` ranks found."""
    flags = ["--model", model, "--device", args.device, "--rows", args.rows, "--sums", args.sums]
    return in_ranks.run(__file__, flags, size, LIMIT_S)


def main() -> int:
    """Each number of ranks, then the table; 1 when tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-32b", choices=sorted(BY_NAME))
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, one after the other")
    parser.add_argument("--rows", default="", help="comma-separated names; default: all")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--sums", default="auto", choices=["auto", "nccl"], help="how ranks sum; auto: as an engine")
    parser.add_argument("--parity", action="store_true", help="compare tokens, float32, and measure nothing")
    parser.add_argument("--out", default="", help="JSON file for the results")
    in_ranks.add_arguments(parser)
    args = parser.parse_args()
    if args.rank >= 0:
        rank_main(args)
        return 0
    model = "parity" if args.parity else args.model
    found = [run(args, model, int(size)) for size in args.ranks.split(",")]
    if args.parity:
        first = found[0]["tokens"]
        for other in found[1:]:
            same = sum(one == two for one, two in zip(first, other["tokens"], strict=True))
            kinds = len({token for row in first for token in row})
            told = f"{same} of {len(first)} requests have the tokens of one ({kinds} kinds)"
            say(f"{other['ranks']} ranks, float32: {told}")
        return int(any(other["tokens"] != first for other in found))
    say(f"\n{model:36}" + "".join(f"{one['ranks']:>8} ranks" for one in found) + "   gain   vLLM's gain")
    for row in ROWS:
        if row.name not in found[0]["rows"]:
            continue
        values = [statistics.median(one["rows"][row.name]["values"]) for one in found]
        peer = PEER.get(model, {}).get(row.name)
        told = "" if peer is None else f"{row.better(peer[1], peer[0]):>9.2f}x ({peer[0]:g}, {peer[1]:g})"
        gain = f"{row.better(values[-1], values[0]):>6.2f}x"
        say(f"{row.title + ', ' + row.unit:36}" + "".join(f"{value:>14.1f}" for value in values) + f" {gain} {told}")
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
