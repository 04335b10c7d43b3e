"""A ring of record slots in memory that a transport can register: decode's to be written, prefill's to write from."""

from __future__ import annotations

import ctypes
import mmap

from ..errors import Overloaded
from .record import HEADER_BYTES

SLOT_BYTES = 8192
"""Room for a record: 20 top logprobs and long ids need about 2 KiB."""


class RecordSlots:
    """`count` slots of SLOT_BYTES in one page-aligned region. Not thread-safe: its owner locks."""

    def __init__(self, count: int = 1024) -> None:
        self.nbytes = count * SLOT_BYTES
        self._map = mmap.mmap(-1, self.nbytes)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._count = count
        self._free = list(range(count - 1, -1, -1))

    def take(self) -> int:
        """Address of a slot whose header is cleared. Raises Overloaded when all are taken."""
        if not self._free:
            raise Overloaded(f"all {self._count} KV transfer records of this process are taken; retry later")
        address = self.base + self._free.pop() * SLOT_BYTES
        self.clear(address)
        return address

    def clear(self, address: int) -> None:
        """No record is there any more."""
        ctypes.memset(address, 0, HEADER_BYTES)

    def give(self, address: int) -> None:
        """Return a slot. Only when nothing can write to it any more."""
        index, rest = divmod(address - self.base, SLOT_BYTES)
        assert rest == 0 and 0 <= index < self._count and index not in self._free, f"slot {address:#x} is not taken"
        self._free.append(index)

    def read(self, address: int) -> bytes:
        """The slot's bytes."""
        return ctypes.string_at(address, SLOT_BYTES)

    def write(self, address: int, raw: bytes) -> None:
        """Fill a slot. ValueError names size and limit."""
        if len(raw) > SLOT_BYTES:
            raise ValueError(f"record of {len(raw)} bytes does not fit a slot of {SLOT_BYTES}")
        ctypes.memmove(address, raw, len(raw))
