"""One rank of two of test_peer_sum.py, on a card of its own. Arguments: rank, meeting file, what to do, a room's bytes.

race: thousands of calls with random delays, large and small, in graphs and not, against the definition.
overdue, given up: rank 1 never comes to the last sum; rank 0 waits for it.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading

import torch
from torch import Tensor, distributed

from isthmus_kernels.peer_sum import reference
from isthmus_runtime.config import apply_native_environment
from isthmus_runtime.executor.peer_sums import PeerSums
from isthmus_runtime.executor.ranks import Ranks, join

WIDTH, CALLS, EVERY = 5120, 10_000, 250


def parts_of(seed: int, rows: int, width: int) -> list[Tensor]:
    """Both ranks', which each makes for itself."""
    torch.manual_seed(seed)
    return [torch.randn(rows, width, device="cuda").bfloat16() for _ in range(2)]


def race(ranks: Ranks, sums: PeerSums) -> dict[str, object]:
    rank, own = ranks.shard.rank, random.Random(ranks.shard.rank)
    shared = random.Random(11)
    base = parts_of(1, 700, WIDTH)
    weight = torch.randn(WIDTH, device="cuda").bfloat16()
    fixed = [base[rank][:count].clone() for count in (1, 4, 130)]
    sums.sum(base[rank][:1].clone())  # what is called first is loaded, which is not for a graph
    graph = torch.cuda.CUDAGraph()
    replayed = [torch.empty_like(x) for x in fixed]
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for x, into in zip(fixed, replayed, strict=True):
            into.copy_(x)
            sums.sum(into)
    calls = wrong = 0
    while calls < CALLS:
        results: list[tuple[Tensor, Tensor]] = []
        for _ in range(EVERY):
            rows = shared.choice((1, 1, 1, 2, 8, 64, 128, 133, 300, 700))
            first = shared.randrange(700 - rows + 1)
            kind = shared.randrange(4)
            if own.random() < 0.02:
                torch.cuda._sleep(own.randrange(2_000_000))
            pair = [one[first : first + rows] for one in base]
            if kind == 0:
                graph.replay()
                results += [(x.clone(), reference.peer_sum([one[: len(x)] for one in base])) for x in replayed[:1]]
                calls += 3
            elif kind == 1:
                x, stream = pair[rank].clone(), pair[0].clone()
                expected = pair[0].clone()
                reference.peer_sum_add_rms_norm(pair, expected, weight, 1e-6)
                sums.sum_add_rms_norm(x, stream, weight, 1e-6, x)
                results.append((stream, expected))
                calls += 1
            else:
                x = pair[rank].clone()
                sums.sum(x)
                results.append((x, reference.peer_sum(pair)))
                calls += 1
        wrong += sum(not torch.equal(found, expected) for found, expected in results)
    return {"sums": ranks.sums, "calls": calls, "wrong": wrong}


def lost(ranks: Ranks, sums: PeerSums, how: str) -> dict[str, object]:
    x = torch.randn(3, WIDTH, device="cuda").bfloat16()
    sums.sum(x)
    torch.cuda.synchronize()
    distributed.barrier(ranks.plans)
    if ranks.shard.rank:
        os._exit(0)
    if how == "given up":
        threading.Timer(1.0, ranks.give_up).start()
    sums.sum(x)
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return {"error": str(error).splitlines()[0], "overdue": ranks.overdue()}
    return {"error": "", "overdue": ""}


def main() -> None:
    rank, meeting, what, room = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    apply_native_environment({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"})
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    patience_s = 2.0 if what == "overdue" else 60.0
    ranks = join(rank, 2, meeting, device, 60.0, room=room, patience_s=patience_s)
    torch.cuda.set_stream(torch.cuda.Stream(device))
    sums = ranks.shard.collectives
    assert isinstance(sums, PeerSums), ranks.sums
    told = race(ranks, sums) if what == "race" else lost(ranks, sums, what)
    print(json.dumps(told), flush=True)
    if what == "race":
        distributed.barrier(ranks.plans)
    # After a trap nothing of CUDA's ends as it should.
    os._exit(0)


if __name__ == "__main__":
    main()
