"""One rank of two on CPUs, of test_peer_sums.py. Arguments: rank, meeting file. Its last line is JSON."""

from __future__ import annotations

import io
import json
import logging
import sys

import torch
from torch import distributed

from isthmus_runtime.executor.peer_sums import open_peer_sums
from isthmus_runtime.executor.ranks import join


def main() -> None:
    rank, meeting = int(sys.argv[1]), sys.argv[2]
    told = io.StringIO()
    logging.basicConfig(stream=told, level=logging.WARNING)
    ranks = join(rank, 2, meeting, torch.device("cpu"), 60.0)
    collected = ranks.shard.collectives
    assert collected is not None
    x = torch.full((2, 8), float(rank + 1))
    collected.sum(x)
    opened = open_peer_sums(collected, ranks.plans, torch.device("cpu"), patience_s=1.0)
    line = {"sums": ranks.sums, "total": float(x.max()), "opened": opened is not None, "log": told.getvalue()}
    print(json.dumps(line), flush=True)
    distributed.barrier(ranks.plans)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
