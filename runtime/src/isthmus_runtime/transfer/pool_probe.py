"""Whether a storage pool that was just joined gives back what is put into it, and how fast."""

from __future__ import annotations

import ctypes
import mmap
import uuid
from collections.abc import Callable
from typing import Any

KEYS = 16
VALUE_BYTES = 256 << 10
ROUND_BYTES = KEYS * VALUE_BYTES
PAUSE_S = 0.05
"""Between two rounds."""
_NO_SPACE = -200


class PoolFull(Exception):
    """The pool has no room for the probe: it works, and its speed is not known."""


class PoolProbe:
    """Puts values of its own, reads them back, compares, and removes them. Blocks: run it where it can be given up.

    The memory is its own, so that a call that was given up touches nothing else.
    """

    def __init__(self, store: Any, clock: Callable[[], float], wait: Callable[[float], object]) -> None:
        """`store`: a MooncakeDistributedStore. `wait(seconds)` pauses."""
        self._store = store
        self._clock = clock
        self._wait = wait
        self._name = uuid.uuid4().hex
        self._rounds = 0
        self._map = mmap.mmap(-1, 2 * ROUND_BYTES)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if code := store.register_buffer(self._base, 2 * ROUND_BYTES):
            raise RuntimeError(f"registering {2 * ROUND_BYTES} bytes gave {code}")

    def until_it_works(self, config: Any, deadline: float) -> tuple[float, str]:
        """GB/s of the first round in which every value came back, or (0, the last problem) at `deadline`.

        The slower of putting and getting counts. `config`: the ReplicateConfig to put with. Raises PoolFull.
        """
        while True:
            gbps, problem = self.once(config)
            if not problem or self._clock() >= deadline:
                return gbps, problem
            self._wait(PAUSE_S)

    def once(self, config: Any) -> tuple[float, str]:
        """One round."""
        self._rounds += 1
        keys = [f"probe:{self._name}:{self._rounds}:{i}" for i in range(KEYS)]
        sizes = [VALUE_BYTES] * KEYS
        sources = [self._base + i * VALUE_BYTES for i in range(KEYS)]
        targets = [address + ROUND_BYTES for address in sources]
        wanted = b"".join(bytes([(self._rounds * KEYS + i) % 255 + 1]) * VALUE_BYTES for i in range(KEYS))
        ctypes.memmove(self._base, wanted, ROUND_BYTES)
        ctypes.memset(self._base + ROUND_BYTES, 0, ROUND_BYTES)
        try:
            began = self._clock()
            put = list(self._store.batch_put_from(keys, sources, sizes, config))
            stored = self._clock()
            if any(put):
                if all(code in (0, _NO_SPACE) for code in put):
                    raise PoolFull
                return 0.0, f"put gave {sorted(set(put))}"
            got = list(self._store.batch_get_into(keys, targets, sizes))
            ended = self._clock()
            if got != sizes:
                return 0.0, f"get of {VALUE_BYTES} bytes gave {sorted(set(got))}"
            if ctypes.string_at(self._base + ROUND_BYTES, ROUND_BYTES) != wanted:
                return 0.0, "other bytes came back than were put"
        finally:
            # By force: the read just done holds a lease.
            self._store.batch_remove(keys, True)
        slower = max(stored - began, ended - stored, 1e-6)
        return ROUND_BYTES / slower / 1e9, ""

    def close(self) -> None:
        """Give the memory back. Not while a round still runs."""
        self._store.unregister_buffer(self._base)
