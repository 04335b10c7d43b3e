"""Checksums of blocks in host memory, on a thread of their own: they take about a second per gigabyte."""

from __future__ import annotations

import ctypes
import logging
import threading
import zlib
from collections.abc import Callable, Sequence
from functools import partial

from ..errors import ConfigError
from ..interfaces.transport import KvRegion
from ..threads import running_pool, send
from .bounded import TookTooLong, run_bounded

_log = logging.getLogger(__name__)


def block_crc32(region: KvRegion, block: int, crc: int) -> int:
    """`crc`, of the blocks before it, with the payload bytes of one more block in host memory (CRC-32)."""
    view = (ctypes.c_char * region.block_bytes).from_address(region.base + block * region.block_stride)
    return zlib.crc32(view, crc)


class Checksums:
    """One after another. Raises ConfigError for a pool that is not in host memory."""

    def __init__(self, region: KvRegion) -> None:
        if region.device != "cpu":
            raise ConfigError(
                f"--transfer-crc reads KV in host memory, but the pool is on {region.device!r}; leave it out"
            )
        self._region = region
        self._closing = threading.Event()
        self._thread = running_pool(1, "transfer-crc")

    def compute(self, block_ids: Sequence[int], then: Callable[[int], None]) -> None:
        """Call `then` with the CRC-32 of the blocks in this order, on the thread; not once it is closing."""

        def work() -> None:
            crc = 0
            for block in block_ids:
                if self._closing.is_set():
                    return
                crc = block_crc32(self._region, block, crc)
            then(crc)

        send(self._thread, work)

    def stop(self) -> None:
        """Begin no further block."""
        self._closing.set()

    def close(self, timeout_s: float) -> None:
        """Stop, and wait for the block that is being read."""
        self.stop()
        try:
            run_bounded(partial(self._thread.shutdown, wait=True, cancel_futures=True), timeout_s, "transfer-close")
        except TookTooLong:
            _log.warning("a checksum has not ended within %g s", timeout_s)
