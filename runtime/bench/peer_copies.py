"""Blocks of one GPU's memory written into another's, in another process of the host: as `transfer/peer_memory.py` does
it, and in other ways, by the size of a piece.

    python runtime/bench/peer_copies.py [--pool-gib 4] [--pieces 16384,1048576] [--json FILE]

Pieces lie in any order on both sides. GB/s from the first call to the last byte, and in brackets what the calls alone
take of that; medians of 5. Two processes, each of which sees its own GPU and, with `--both-visible`, the other's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_table import say

from isthmus_runtime.interfaces.transport import KvRegion
from isthmus_runtime.transfer.peer_memory import PeerMemory, batches
from isthmus_runtime.transfer.transport import MOVING, Run

REPEATS = 5
TOTAL = 1 << 30
MOST = 8192
"""Pieces of one try."""
KV_BLOCK = 36 * 2 * 16 * 8 * 128 * 2
"""Of Qwen3-8B, 16 tokens, bf16."""
PIECES = (16 << 10, 64 << 10, 256 << 10, 1 << 20, KV_BLOCK, 4 << 20, 16 << 20)


def open_pool(gib: float) -> tuple[torch.Tensor, PeerMemory]:
    """A pool on this process's first GPU."""
    pool = torch.zeros(int(gib * 2**30), dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    region = KvRegion(
        base=pool.data_ptr(), num_blocks=len(pool) >> 20, block_bytes=1 << 20, block_stride=1 << 20,
        layout_digest="", device="cuda:0",
    )  # fmt: skip
    return pool, PeerMemory(region, time.perf_counter)


def serve(gib: float) -> None:
    """The other process: offers its pool and sums up what is in it, until its input ends."""
    pool, memory = open_pool(gib)
    print(json.dumps([memory.offer, memory.region.base]), flush=True)
    for line in sys.stdin:
        begin, nbytes = json.loads(line)
        part = pool[begin : begin + nbytes].view(torch.int32)
        print(json.dumps(int(part.sum(dtype=torch.int64))), flush=True)


def ways(memory: PeerMemory, cuda: Any) -> dict[str, Callable[[list[Run]], Any]]:
    """By name: begins to copy the runs, and gives what waits for their end."""
    streams = [cuda.cudaStreamCreateWithFlags(cuda.cudaStreamNonBlocking)[1] for _ in range(4)]

    def ended(used: int) -> Callable[[], None]:
        return lambda: [cuda.cudaStreamSynchronize(stream) for stream in streams[:used]] and None

    def plain(used: int) -> Callable[[list[Run]], Callable[[], None]]:
        def start(runs: list[Run]) -> Callable[[], None]:
            kind = cuda.cudaMemcpyKind.cudaMemcpyDefault
            for number, run in enumerate(runs):
                cuda.cudaMemcpyAsync(run.target, run.source, run.nbytes, kind, streams[number % used])
            return ended(used)

        return start

    def batched(used: int) -> Callable[[list[Run]], Callable[[], None]]:
        def start(runs: list[Run]) -> Callable[[], None]:
            attributes = cuda.cudaMemcpyAttributes()
            attributes.srcAccessOrder = cuda.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
            for number in range(used):
                part = runs[number::used]
                to, source, sizes = [r.target for r in part], [r.source for r in part], [r.nbytes for r in part]
                code = cuda.cudaMemcpyBatchAsync(to, source, sizes, len(part), [attributes], [0], 1, streams[number])[0]
                if code:
                    raise RuntimeError(code.name)
            return ended(used)

        return start

    return {
        "1 stream": plain(1), "2 streams": plain(2), "4 streams": plain(4),
        "batch": batched(1), "2 batches": batched(2), "4 batches": batched(4),
    }  # fmt: skip


def measure(start: Callable[[list[Run]], Callable[[], None]], runs: list[Run]) -> tuple[float, float]:
    """GB/s to the last byte, and milliseconds of the calls."""
    rates, calls = [], []
    for number in range(REPEATS + 1):
        began = time.perf_counter()
        wait = start(runs)
        called = time.perf_counter() - began
        wait()
        if number:
            rates.append(sum(run.nbytes for run in runs) / (time.perf_counter() - began) / 1e9)
            calls.append(called * 1e3)
    return statistics.median(rates), statistics.median(calls)


def main() -> int:
    """Start the other process, map its pool, measure; 1 where bytes are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool-gib", type=float, default=4.0)
    parser.add_argument("--pieces", default=",".join(map(str, PIECES)))
    parser.add_argument("--gpus", default="0,1", help="this process's and the other's")
    parser.add_argument("--both-visible", action="store_true")
    parser.add_argument("--json", default="")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.pool_gib)
        return 0
    own, other = args.gpus.split(",")
    visible = {"CUDA_VISIBLE_DEVICES": f"{other},{own}" if args.both_visible else other}
    argv = [sys.executable, __file__, "--serve", "--pool-gib", str(args.pool_gib)]
    environment = {**os.environ, **visible}  # noqa: TID251
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        os.environ["CUDA_VISIBLE_DEVICES"] = f"{own},{other}" if args.both_visible else own  # noqa: TID251
        pool, memory = open_pool(min(args.pool_gib, 8.0))
        assert process.stdin is not None and process.stdout is not None
        offer, base = json.loads(process.stdout.readline())
        began = time.perf_counter()
        address = memory.reach(offer)
        took = (time.perf_counter() - began) * 1e3
        say(f"mapped and read {args.pool_gib:g} GiB in {took:.1f} ms; read at {memory.gbps:.0f} GB/s")
        found: dict[str, Any] = {"map_ms": took, "read_gbps": memory.gbps, "rates": {}}
        from cuda.bindings import runtime as cuda

        kinds = ways(memory, cuda)
        room = min(len(pool), int(args.pool_gib * 2**30))
        say(f"{'piece':>10} {'count':>6} " + " ".join(f"{name:>15}" for name in [*kinds, "as we do it"]))
        for piece in map(int, args.pieces.split(",")):
            count = min(MOST, min(TOTAL, room) // piece)
            rng, places = random.Random(piece), room // piece
            here, there = rng.sample(range(places), count), rng.sample(range(places), count)
            runs = [Run(pool.data_ptr() + a * piece, base + b * piece, piece) for a, b in zip(here, there, strict=True)]
            mapped = [Run(run.source, run.target - base + address, piece) for run in runs]

            def submitted(runs: list[Run] = runs) -> Callable[[], None]:
                copies = [memory.submit(offer, base, batch) for batch in batches(runs)]

                def wait() -> None:
                    for copy in copies:
                        while copy.status() == MOVING:
                            pass

                return wait

            row = {}
            for name, start in kinds.items():
                try:
                    row[name] = measure(start, mapped)
                except (RuntimeError, TypeError) as error:  # a driver or a package that has no such call
                    say(f"{name}: {error}")
                    row[name] = (0.0, 0.0)
            row["as we do it"] = measure(lambda _: submitted(), runs)
            found["rates"][piece] = row
            say(f"{piece:>10} {count:>6} " + " ".join(f"{rate:>7.1f} ({ms:5.2f})" for rate, ms in row.values()))
            pool.random_(0, 255)
            torch.cuda.synchronize()
            submitted()()
            for a, b in list(zip(here, there, strict=True))[:: max(1, count // 50)]:
                process.stdin.write(json.dumps([b * piece, piece]) + "\n")
                process.stdin.flush()
                told = int(json.loads(process.stdout.readline()))
                if told != int(pool[a * piece : (a + 1) * piece].view(torch.int32).sum(dtype=torch.int64)):
                    say(f"piece {a} to {b} of {piece} bytes: WRONG")
                    return 1
        memory.close()
        if args.json:
            Path(args.json).write_text(json.dumps(found, indent=1))
        return 0
    finally:
        process.kill()
        process.wait(30)


if __name__ == "__main__":
    sys.exit(main())
