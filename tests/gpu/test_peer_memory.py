"""Blocks of one GPU's pool written into another's, of another process: every byte, and nothing beside them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from isthmus_runtime.interfaces.transport import KvRegion
from isthmus_runtime.transfer.peer_memory import FLOOR_GBPS, PeerMemory, batches, reaches_a_peer
from isthmus_runtime.transfer.transport import DONE, MOVING, Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
WAIT_S = 60.0
BLOCKS, BLOCK = 640, 147456
# Over a large allocation's worth, so that the pool is one of its own and not at its beginning.
OTHER = f"""
import json, sys, time, torch
from isthmus_runtime.interfaces.transport import KvRegion
from isthmus_runtime.transfer.peer_memory import PeerMemory
whole = torch.zeros({BLOCKS} * {BLOCK} + 4096, dtype=torch.uint8, device="cuda:0")
pool = whole[4096:]
region = KvRegion(base=pool.data_ptr(), num_blocks={BLOCKS}, block_bytes={BLOCK}, block_stride={BLOCK},
                  layout_digest="", device="cuda:0")
memory = PeerMemory(region, time.monotonic)
print(json.dumps([memory.offer, region.base]), flush=True)
for line in sys.stdin:
    print(json.dumps(pool.view({BLOCKS}, -1).view(torch.int64).sum(1).tolist()), flush=True)
"""


class Other:
    """A process with a pool on the second GPU."""

    def __init__(self, visible: str) -> None:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
        self.process = subprocess.Popen(
            [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.offer, self.base = json.loads(self._line())

    def sums(self) -> list[int]:
        """Of each block, as its own kernels read it."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return list(json.loads(self._line()))

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the other process has ended"
        return line


@pytest.fixture(params=["1", "1,0"], ids=["each sees its own", "the other sees both"])
def other(request: pytest.FixtureRequest) -> Iterator[Other]:
    made = Other(request.param)
    yield made
    made.process.kill()
    made.process.communicate(timeout=WAIT_S)


def test_blocks_arrive_and_nothing_else_changes(other: Other) -> None:
    torch.manual_seed(7)
    pool = torch.randint(-(2**40), 2**40, (BLOCKS, BLOCK // 8), dtype=torch.int64, device="cuda:0")
    torch.cuda.synchronize()
    region = KvRegion(
        base=pool.data_ptr(), num_blocks=BLOCKS, block_bytes=BLOCK, block_stride=BLOCK, layout_digest="",
        device="cuda:0",
    )  # fmt: skip
    memory = PeerMemory(region, time.monotonic)
    rng = random.Random(7)
    here, there = rng.sample(range(BLOCKS), 300), rng.sample(range(BLOCKS), 300)
    runs = [Run(region.base + a * BLOCK, other.base + b * BLOCK, BLOCK) for a, b in zip(here, there, strict=True)]
    copies = [memory.submit(other.offer, other.base, batch) for batch in batches(runs, 10 << 20)]
    end = time.monotonic() + WAIT_S
    while any(copy.status() == MOVING for copy in copies):
        assert time.monotonic() < end, "a copy does not end"
    assert [copy.status() for copy in copies] == [DONE] * len(copies)
    sums, expected = pool.sum(1).tolist(), [0] * BLOCKS
    for a, b in zip(here, there, strict=True):
        expected[b] = sums[a]
    assert other.sums() == expected
    print(f"read at {memory.gbps:.0f} GB/s")
    assert memory.gbps >= FLOOR_GBPS
    beyond = batches([Run(region.base, other.base + BLOCKS * BLOCK, BLOCK)])[0]
    with pytest.raises(ValueError, match="not in the peer's"):
        memory.submit(other.offer, other.base, beyond)
    memory.close()


def test_the_memory_of_a_process_that_ended_is_free_once_it_is_unmapped(other: Other) -> None:
    pool = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda:0")
    region = KvRegion(
        base=pool.data_ptr(), num_blocks=1, block_bytes=1 << 20, block_stride=1 << 20, layout_digest="", device="cuda:0"
    )
    memory = PeerMemory(region, time.monotonic)
    memory.reach(other.offer)
    other.process.kill()
    other.process.wait(WAIT_S)
    held = torch.cuda.mem_get_info(1)[0]
    memory.close()
    assert torch.cuda.mem_get_info(1)[0] - held >= BLOCKS * BLOCK
    print(f"{(torch.cuda.mem_get_info(1)[0] - held) / 2**20:.0f} MiB were held by the mapping")


def test_this_process_sees_the_other_gpu() -> None:
    assert reaches_a_peer("cuda:0") and not reaches_a_peer("cpu")
