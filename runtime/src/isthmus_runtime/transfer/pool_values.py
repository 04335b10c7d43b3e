"""Values in the storage pool, each under its name and with its seal. Single calls: `pool_moves` orders them.

The seal travels in the same object as its payload, gathered from two pieces of memory: it is there when the payload is,
by whoever was first to put that key, and no block in the KV pool needs room for it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence

from ..interfaces.transport import KvRegion, Piece
from ..kv.keys import pool_name
from .joining import StorePool
from .pool_codes import MISSING, UNREACHABLE, explain
from .seal import SEAL_BYTES, is_sealed, seal
from .slots import SLOT_BYTES


class SealRoom:
    """Memory for the seals of calls that run side by side: each caller has `keys` places of its own."""

    def __init__(self, callers: int, keys: int) -> None:
        self.keys = keys
        self.nbytes = -(-callers * keys * SEAL_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self.nbytes)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def places(self, caller: int) -> list[int]:
        """Addresses of one caller's places."""
        first = self.base + caller * self.keys * SEAL_BYTES
        return [first + number * SEAL_BYTES for number in range(self.keys)]


class PoolValues:
    """Calls block as long as the pool does. `seals`: places of the calling thread, one for each piece."""

    def __init__(
        self,
        pool: StorePool,
        region: KvRegion,
        *,
        replicas: int,
        secret: bytes,
        unreachable: Callable[[], None],
    ) -> None:
        """`unreachable`: told when a call did not reach the master."""
        self._pool = pool
        self._region = region
        self._replicas = replicas
        self._secret = secret
        self._unreachable = unreachable

    def put(self, pieces: Sequence[Piece], seals: Sequence[int], *, pinned: bool) -> list[int]:
        """A code for each; 0 also where the key exists: it keeps the value and the seal that it has."""
        for piece, place in zip(pieces, seals, strict=False):
            ctypes.memmove(place, seal(self._secret, piece.key, self._payload(piece)), SEAL_BYTES)
        codes: list[int] = self._pool.store.batch_put_from_multi_buffers(
            self._names([p.key for p in pieces]), *self._parts(pieces, seals), self._config(pinned)
        )
        return self._seen(codes)

    def get(self, pieces: Sequence[Piece], seals: Sequence[int]) -> list[int]:
        """Bytes of each value, its seal included, or a negative code. Whether they are whole: `damaged`."""
        codes: list[int] = self._pool.store.batch_get_into_multi_buffers(
            self._names([p.key for p in pieces]), *self._parts(pieces, seals)
        )
        return self._seen(codes)

    def damaged(self, pieces: Sequence[Piece], seals: Sequence[int]) -> list[Piece]:
        """Those of the pieces just read whose seal is not theirs."""
        return [
            piece
            for piece, place in zip(pieces, seals, strict=False)
            if not is_sealed(self._secret, piece.key, self._payload(piece), ctypes.string_at(place, SEAL_BYTES))
        ]

    def put_record(self, key: str, slot: int, record: bytes) -> int:
        """Store a record from its slot; its code."""
        sealed = record + seal(self._secret, key, record)
        assert len(sealed) <= SLOT_BYTES, f"record of {len(record)} bytes"
        ctypes.memmove(slot, sealed, len(sealed))
        codes: list[int] = self._pool.store.batch_put_from(
            self._names([key]), [slot], [len(sealed)], self._config(pinned=True)
        )
        return self._seen(codes)[0]

    def get_record(self, key: str, slot: int) -> tuple[bytes, str]:
        """A record, or why there is none."""
        codes: list[int] = self._pool.store.batch_get_into(self._names([key]), [slot], [SLOT_BYTES])
        length = self._seen(codes)[0]
        if length < 0:
            return b"", explain(length)
        raw = ctypes.string_at(slot, length)
        record = raw[:-SEAL_BYTES]
        if not is_sealed(self._secret, key, record, raw[-SEAL_BYTES:]):
            return b"", "it is damaged in the pool"
        return record, ""

    def lease(self, keys: Sequence[str]) -> list[int]:
        """For each key 1: it is in the pool, and is not evicted for a while; 0: it is not; or a negative code."""
        return self._seen(list(self._pool.store.batch_is_exist(self._names(keys))))

    def remove(self, keys: Sequence[str]) -> str:
        """Remove values, by force: whoever just read one still leases it. What is gone already is fine."""
        codes = self._seen(self._pool.store.batch_remove(self._names(keys), True))
        bad = [code for code in codes if code not in (0, MISSING)]
        return explain(bad[0]) if bad else ""

    def _names(self, keys: Sequence[str]) -> list[str]:
        return [pool_name(self._secret, key) for key in keys]

    def _address(self, piece: Piece) -> int:
        return self._region.base + piece.block_id * self._region.block_stride + piece.offset

    def _payload(self, piece: Piece) -> memoryview:
        return memoryview((ctypes.c_char * piece.nbytes).from_address(self._address(piece))).cast("B")

    def _parts(self, pieces: Sequence[Piece], seals: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
        """Addresses and sizes: the payload, then its seal."""
        addresses = [[self._address(p), place] for p, place in zip(pieces, seals, strict=False)]
        return addresses, [[p.nbytes, SEAL_BYTES] for p in pieces]

    def _config(self, pinned: bool) -> object:
        config = self._pool.native.ReplicateConfig()
        config.replica_num = self._replicas
        config.with_hard_pin = pinned
        config.preferred_segment = self._pool.segment
        return config

    def _seen(self, codes: list[int]) -> list[int]:
        if any(code in UNREACHABLE for code in codes):
            self._unreachable()
        return codes
