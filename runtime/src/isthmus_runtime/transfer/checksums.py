"""Checksums of blocks in host memory, on a thread of their own: they take about a second per gigabyte."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial, reduce
from struct import Struct
from zlib import crc32

from ..errors import ConfigError
from ..interfaces.transport import KvRegion
from ..threads import running_pool, send
from .bounded import TookTooLong, run_bounded

_log = logging.getLogger(__name__)
_WORD = Struct("<I")


def block_crc32(region: KvRegion, block: int, crc: int) -> int:
    """`crc`, of the blocks before it, with the payload bytes of one more block in host memory (CRC-32)."""
    view = (ctypes.c_char * region.block_bytes).from_address(region.base + block * region.block_stride)
    return crc32(view, crc)


AskRank = Callable[[Sequence[int], Callable[[int], None]], None]
"""Has another rank compute the CRC-32 of its part of blocks, and call the function with it."""


class Checksums:
    """One after another. Raises ConfigError for a pool that is not in host memory."""

    def __init__(self, region: KvRegion, others: Sequence[AskRank] = ()) -> None:
        """`others`: by rank, those that have parts of the blocks, too."""
        if region.device != "cpu":
            raise ConfigError(
                f"--transfer-crc reads KV in host memory, but the pool is on {region.device!r}; leave it out"
            )
        self._region = region
        self._others = others
        self._closing = threading.Event()
        self._thread = running_pool(1, "transfer-crc")

    def compute(self, block_ids: Sequence[int], then: Callable[[int], None]) -> None:
        """Call `then` with the CRC-32 of the blocks in this order, on the thread; not once it is closing.

        Of several ranks it is that of the first, gone on with over those of the others, four bytes each.
        """
        parts: dict[int, int] = {}
        lock = threading.Lock()

        def part(rank: int, crc: int) -> None:
            with lock:
                parts[rank] = crc
                whole = len(parts) == 1 + len(self._others)
            if whole:
                then(reduce(lambda crc, rank: crc32(_WORD.pack(parts[rank]), crc), range(1, len(parts)), parts[0]))

        def work() -> None:
            crc = 0
            for block in block_ids:
                if self._closing.is_set():
                    return
                crc = block_crc32(self._region, block, crc)
            part(0, crc)

        for rank, ask in enumerate(self._others, 1):
            ask(block_ids, partial(part, rank))
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
