"""A KV pool on a GPU is moved by what can read it, or refused before a byte is registered."""

from __future__ import annotations

import time

import pytest

from isthmus_runtime.errors import ConfigError
from isthmus_runtime.interfaces.transport import KvRegion
from isthmus_runtime.transfer.bounded import built_for_cpus
from isthmus_runtime.transfer.direct import DirectTransfer
from isthmus_runtime.transfer.store import StoreTransfer
from isthmus_runtime.transfer.transport import check_memory

# An address that nobody has: who reads it does not come back.
REGION = KvRegion(base=4096, num_blocks=1, block_bytes=64, block_stride=64, layout_digest="L", device="cuda:0")


def test_direct_names_the_build_that_reads_a_gpu() -> None:
    assert built_for_cpus(), "the tests run with the build for CPUs"
    transfer = DirectTransfer(
        host="127.0.0.1", epoch="e", transport="tcp", fallback="deny", timeout_s=5.0, clock=time.monotonic
    )
    with pytest.raises(ConfigError, match=r"cuda:0.*mooncake-transfer-engine-cuda13"):
        transfer.prepare(REGION, 5.0)


def test_the_store_takes_no_pool_of_a_gpu() -> None:
    store = StoreTransfer(host="127.0.0.1", master="127.0.0.1:1", segment_bytes=1 << 20)
    with pytest.raises(ConfigError, match=r"cuda:0.*--transfer-mode direct"):
        store.prepare(REGION, 5.0)


def test_the_other_build_may_move_it_and_host_memory_is_anyones() -> None:
    check_memory("direct", "cuda:0", built_for_cpus=False)
    for mode in ("direct", "store"):
        check_memory(mode, "cpu", built_for_cpus=True)
