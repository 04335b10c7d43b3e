"""Sums over the GPUs of one host, with the residual addition and RMSNorm after them: NCCL, PyTorch's symmetric memory,
and memory that ranks map of each other (kernels' `peer_sum`), one process a GPU.

Microseconds a sum: of sums in a CUDA graph, medians of replays, the slowest rank's; in brackets, of single launches.

    python runtime/bench/peer_sums.py [--ranks 2] [--width 5120] [--rows 1,128] [--rooms 131072,655360] [--out JSON]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import in_ranks
import torch
from torch import Tensor, distributed

from isthmus_kernels import dispatch
from isthmus_kernels.peer_sum import reference
from isthmus_runtime.config import apply_native_environment
from isthmus_runtime.executor.peer_sums import PeerSums, open_peer_sums
from isthmus_runtime.executor.ranks import join

ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
EPS = 1e-6
LIMIT_S = 300.0
Form = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""x, residual, weight, out."""


def symmetric_forms(group: distributed.ProcessGroup, most: int, width: int, device: torch.device) -> dict[str, Form]:
    """PyTorch's, each with our norm after it; `in place`: x would have to be written into symmetric memory."""
    import torch.distributed._symmetric_memory as symmetric

    name, memory = group.group_name, symmetric.empty((most, width), dtype=torch.bfloat16, device=device)
    symmetric.rendezvous(memory, group)
    ops = torch.ops.symm_mem

    def one_shot_copy(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor) -> None:
        total = ops.one_shot_all_reduce_copy(memory[: len(x)], x, "sum", name)
        dispatch.add_rms_norm(total, residual, weight, EPS, out=out)

    def one_shot(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor) -> None:
        total = ops.one_shot_all_reduce(memory[: len(x)], "sum", name)
        dispatch.add_rms_norm(total, residual, weight, EPS, out=out)

    def two_shot(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor) -> None:
        total = ops.two_shot_all_reduce_(memory[: len(x)], "sum", name)
        dispatch.add_rms_norm(total, residual, weight, EPS, out=out)

    return {"symm one-shot, copied": one_shot_copy, "symm one-shot": one_shot, "symm two-shot": two_shot}


def timed(form: Form, tensors: list[Tensor], calls: int, group: distributed.ProcessGroup) -> tuple[float, float]:
    """Microseconds a call in a graph, and launched one by one."""

    def many() -> None:
        for _ in range(calls):
            form(*tensors)

    many()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        many()
    found: list[list[float]] = [[], []]
    for _ in range(9):
        for run, times in zip((graph.replay, many), found, strict=True):
            distributed.barrier(group)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(found[0]), statistics.median(found[1])


def wrong(form: Form, x: Tensor, group: distributed.ProcessGroup, nccl: Any, fill: Tensor | None) -> str:
    """What is wrong with its result, or empty. `fill`: where x has to be as well."""
    residual, weight = torch.randn_like(x[:1]).repeat(len(x), 1), torch.ones_like(x[0])
    distributed.broadcast(residual, 0, group=nccl)
    before, out = residual.clone(), torch.full_like(x, float("nan"))
    mine = x.clone()
    if fill is not None:
        fill[: len(x)].copy_(x)
    parts = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, mine, group=nccl)
    form(mine, residual, weight, out)
    torch.cuda.synchronize()
    expected = reference.peer_sum_add_rms_norm(parts, before, weight, EPS)
    others = [torch.empty_like(out) for _ in parts]
    distributed.all_gather(others, out, group=nccl)
    if any(not torch.equal(other, out) for other in others):
        return "ranks differ"
    error = (out.float() - expected.float()).norm() / expected.float().norm()
    exact = torch.equal(residual, before)
    return "" if error < 4e-3 else f"error {error:.1e}{'' if exact else ', residual differs'}"


def rank_main(args: argparse.Namespace) -> None:
    apply_native_environment({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"})
    device = torch.device("cuda", args.rank)
    torch.cuda.set_device(device)
    torch.cuda.set_stream(torch.cuda.Stream(device))
    ranks = join(args.rank, args.of, args.meeting, device, 60.0, peer_sums=False)
    collected = ranks.shard.collectives
    assert collected is not None
    nccl = distributed.new_group(backend="nccl")
    rows = [int(one) for one in args.rows.split(",")]
    forms: dict[str, Form] = {"NCCL": lambda x, r, w, o: collected.sum_add_rms_norm(x, r, w, EPS, o)}
    opened: list[PeerSums] = []
    for number, room in enumerate(int(one) for one in args.rooms.split(",")):
        sums = open_peer_sums(collected, ranks.plans, device, patience_s=20.0, limit=1 << 40, room=room)
        assert sums is not None
        opened.append(sums)

        def apart(x: Tensor, r: Tensor, w: Tensor, o: Tensor, sums: PeerSums = sums) -> None:
            sums.sum(x)
            dispatch.add_rms_norm(x, r, w, EPS, out=o)

        if not number:
            forms["own, norm apart"] = apart

        def fused(x: Tensor, r: Tensor, w: Tensor, o: Tensor, sums: PeerSums = sums) -> None:
            sums.sum_add_rms_norm(x, r, w, EPS, o)

        forms[f"own, room {room >> 10} KiB"] = fused
    memory = None
    try:
        symmetric = symmetric_forms(nccl, max(rows), args.width, device)
        memory = symmetric["symm one-shot"].__closure__[0].cell_contents  # type: ignore[index]
        forms.update(symmetric)
    except Exception as error:  # the others are measured without it
        print(f"symmetric memory: {type(error).__name__}: {str(error)[:300]}", flush=True)
    table: dict[str, dict[int, tuple[float, float]]] = {name: {} for name in forms}
    torch.manual_seed(args.rank)
    for count in rows:
        x = torch.randn(count, args.width, device=device, dtype=torch.bfloat16)
        residual, weight = torch.zeros_like(x), torch.ones_like(x[0])
        out = torch.empty_like(x)
        for name, form in forms.items():
            if "symm" in name and "two" not in name and count > 1024:
                continue
            try:
                fill = memory if isinstance(memory, Tensor) and name in ("symm one-shot", "symm two-shot") else None
                said = wrong(form, x, ranks.plans, nccl, fill)
                if said and not args.rank:
                    print(f"{name}, {count} rows: {said}", flush=True)
                calls = 50 if count <= 256 else 10
                times = timed(form, [x.clone(), residual, weight, out], calls, ranks.plans)
            except RuntimeError as error:
                print(f"{name}, {count} rows: {str(error)[:300]}", flush=True)
                raise
            both = [torch.zeros(2, dtype=torch.float64) for _ in range(args.of)]
            distributed.all_gather(both, torch.tensor(times, dtype=torch.float64), group=ranks.plans)
            table[name][count] = (float(max(one[0] for one in both)), float(max(one[1] for one in both)))
    if not args.rank:
        print(json.dumps(table), flush=True)
    distributed.barrier(ranks.plans)


def main() -> int:
    """Start the ranks, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=5120, help="of a row, bf16")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--rooms", default="131072", help="bytes that a thread block has for one other rank")
    parser.add_argument("--out", default="", help="JSON file for the results")
    in_ranks.add_arguments(parser)
    args = parser.parse_args()
    if args.rank >= 0:
        rank_main(args)
        return 0
    flags = ["--width", str(args.width), "--rows", args.rows, "--rooms", args.rooms]
    table = in_ranks.run(__file__, flags, args.ranks, LIMIT_S)
    counts = sorted({int(count) for times in table.values() for count in times})
    print(f"{args.width} columns, bf16; rows " + "".join(f"{count:>16}" for count in counts))
    print(f"{'MiB':24}" + "".join(f"{count * args.width * 2 / 2**20:>16.2f}" for count in counts))
    for name, times in table.items():
        cells = (times.get(str(count)) for count in counts)
        print(f"{name:24}" + "".join(f"{'' if c is None else f'{c[0]:.1f} ({c[1]:.1f})':>16}" for c in cells))
    if args.out:
        Path(args.out).write_text(json.dumps(table, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
