"""A KV pool on one GPU of a host, mapped by the processes of that host's other GPUs, and copies into it over NVLink.

An engine offers its pool by a word in its tickets (CUDA's IPC handle). Who is to write there maps the pool once, reads
a part of it to see that NVLink moves the bytes, and then has its own GPU's copy engine write runs of blocks: no host
memory, no multiprocessor and no call of the peer is part of it. A pool that is read more slowly is not written to.

A mapping keeps the memory of a process that has ended, so that its successor may find too little. One that nothing was
written through for a while is closed, which takes less time than a process needs to be started again.
"""

from __future__ import annotations

import ctypes
import logging
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..cuda_calls import checked, has_bindings, runtime
from ..errors import ConfigError
from ..interfaces.transport import KvRegion
from .transport import DONE, FAILED, MOVING, Run

_log = logging.getLogger(__name__)

FLOOR_GBPS = 60.0
"""More than 16 lanes of PCIe 5 carry in one direction (55 are seen), and a sixth of what NVLink does between two H200s:
a peer that is read more slowly is not reached by NVLink."""
PROBE_BYTES = 64 << 20
_PROBES = 3
IDLE_S = 5.0
"""A mapping through which nothing was written for so long is closed. Mapping one again takes some milliseconds."""
REFUSED_S = 30.0
"""For so long a peer that was read too slowly is not looked at again."""
BATCH_BYTES = 128 << 20
"""Runs of about so many bytes end together: a third of a millisecond, and a poll of the thread that waits for it."""
STUCK_S = 1.0
"""192 MiB at a tenth of the floor take 30 ms: what takes longer than this does not end. All peers wait meanwhile."""
LOOK_S = 0.0002
_STREAMS = 4
"""Each has a part of a batch: between two copies of one stream the link stands still for a microsecond or two."""
_HANDLE_BYTES = 64
_OFFER = re.compile(r"([0-9a-f-]{36})/([0-9a-f]{32})/([0-9a-f]{128})/([0-9]{1,20})/([0-9]{1,20})")


class StillMoving(RuntimeError):
    """Something was submitted, and nobody will learn when it ends."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A pool that processes of one host may map."""

    host: str
    """The boot id of its kernel, which all containers of a host see."""
    gpu: str
    """Its UUID, in hex."""
    handle: bytes
    """Of the allocation, as CUDA gives it to other processes."""
    offset: int
    """Of block 0 in the allocation, in bytes."""
    nbytes: int

    def text(self) -> str:
        """The offer as tickets carry it."""
        return f"{self.host}/{self.gpu}/{self.handle.hex()}/{self.offset}/{self.nbytes}"

    @staticmethod
    def read(text: str) -> Offer:
        """Raises ValueError for what is none."""
        found = _OFFER.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{text[:80]!r} is no offer of a GPU's memory; run decode with --transfer-transport nvlink"
            )
        host, gpu, handle, offset, nbytes = found.groups()
        return Offer(host, gpu, bytes.fromhex(handle), int(offset), int(nbytes))


@dataclass(frozen=True, slots=True)
class Batch:
    """Runs that are copied, and end, together."""

    runs: tuple[Run, ...]
    nbytes: int


def batches(runs: Sequence[Run], most: int = BATCH_BYTES) -> list[Batch]:
    """The runs in their order, about `most` bytes together."""
    made: list[Batch] = []
    part: list[Run] = []
    size = 0
    for run in runs:
        if part and size + run.nbytes > most:
            made.append(Batch(tuple(part), size))
            part, size = [], 0
        part.append(run)
        size += run.nbytes
    return [*made, Batch(tuple(part), size)] if part else made


def shifted(runs: Sequence[Run], base: int, mapped: int, nbytes: int) -> list[Run]:
    """The runs with their targets where the peer's pool, at `base` there and of `nbytes`, is mapped here. ValueError: a
    target is beyond it."""
    for run in runs:
        if not base <= run.target <= base + nbytes - run.nbytes:
            raise ValueError(f"{run.nbytes} bytes at {run.target:#x} are not in the peer's {nbytes} bytes at {base:#x}")
    return [Run(run.source, run.target - base + mapped, run.nbytes) for run in runs]


def available() -> bool:
    """Whether the package is here by which memory is mapped; torch for CUDA brings it."""
    return has_bindings()


def reaches_a_peer(device: str) -> bool:
    """Whether this process sees another GPU that NVLink joins to its own, `device`: atomic operations of one are then
    native on the other's memory, which they are not over PCIe."""
    if not device.startswith("cuda") or not available():
        return False
    cuda, own = runtime(), _index(device)
    try:
        peers = [peer for peer in range(int(checked(cuda.cudaGetDeviceCount()))) if peer != own]
        native = cuda.cudaDeviceP2PAttr.cudaDevP2PAttrNativeAtomicSupported
        return any(int(checked(cuda.cudaDeviceGetP2PAttribute(native, own, peer))) for peer in peers)
    except RuntimeError as error:
        _log.warning("this GPU's peers are not known: %s", error)
        return False


@dataclass(slots=True)
class _Mapping:
    address: int
    """Of the whole allocation, here."""
    used_s: float
    flying: int = 0


@dataclass(slots=True, eq=False)
class Copy:
    """A batch on its way. Its status is final once it is not `MOVING`."""

    _cuda: Any
    _events: list[Any]
    _mapping: _Mapping
    _ended: int = MOVING

    def status(self) -> int:
        """MOVING, DONE or FAILED. Of the thread that submitted it."""
        while self._ended == MOVING and self._events:
            code = self._cuda.cudaEventQuery(self._events[-1])[0]
            if code == self._cuda.cudaError_t.cudaErrorNotReady:
                return MOVING
            if code != self._cuda.cudaError_t.cudaSuccess:
                # An error of CUDA's is one of all streams: nothing of this process moves any more.
                _log.error("a copy to another GPU failed: %s", code.name)
                for event in self._events:
                    self._cuda.cudaEventDestroy(event)
                self._end(FAILED)
                return FAILED
            self._cuda.cudaEventDestroy(self._events.pop())
        if self._ended == MOVING:
            self._end(DONE)
        return self._ended

    def _end(self, how: int) -> None:
        self._ended = how
        self._mapping.flying -= 1


@dataclass(slots=True)
class PeerMemory:
    """One GPU's pool: offered to others, and the source of what is written into theirs.

    Made by any thread; everything else belongs to one thread.
    """

    region: KvRegion
    clock: Callable[[], float]
    offer: str = field(init=False)
    """For tickets."""
    gbps: float = field(init=False, default=0.0)
    """GB/s at which the slowest peer so far was read; 0: none was."""
    _cuda: Any = field(init=False)
    _device: int = field(init=False)
    _streams: list[Any] = field(init=False)
    _scratch: int = field(init=False)
    _mapped: dict[Offer, _Mapping] = field(init=False, default_factory=dict)
    _refused: dict[Offer, tuple[float, str]] = field(init=False, default_factory=dict)
    """Until when, and why: to look again costs all peers the time of a probe."""

    def __post_init__(self) -> None:
        """Raises ConfigError where the pool cannot be offered."""
        if not available():
            raise ConfigError("--transfer-transport nvlink: the package cuda-bindings is not installed; install it")
        self._cuda, self._device = runtime(), _index(self.region.device)
        size = self.region.num_blocks * self.region.block_stride
        try:
            self._enter()
            base = _allocation(self.region.base)
            # What has the memory is kept until it is read.
            shared = checked(self._cuda.cudaIpcGetMemHandle(base))
            handle = ctypes.string_at(shared.getPtr(), _HANDLE_BYTES)
            properties = checked(self._cuda.cudaGetDeviceProperties(self._device))
            gpu = bytes(properties.uuid.bytes)
            flags = self._cuda.cudaStreamNonBlocking
            self._streams = [checked(self._cuda.cudaStreamCreateWithFlags(flags)) for _ in range(_STREAMS)]
            self._scratch = int(checked(self._cuda.cudaMalloc(PROBE_BYTES)))
        except RuntimeError as error:
            raise ConfigError(
                f"--transfer-transport nvlink: the KV pool on {self.region.device} cannot be shared with other "
                f"processes ({error}); use another transport"
            ) from error
        self.offer = Offer(_host(), gpu.hex(), handle, self.region.base - base, size).text()

    def submit(self, offer: str, base: int, batch: Batch) -> Copy:
        """Copy to the pool of that offer, which is at `base` in its own process.

        Raises:
            ValueError: it is on another host, is not reached by NVLink, or a run is beyond it.
            RuntimeError: CUDA's, with what it said. `StillMoving`: and a part of the batch is on its way for good.
        """
        mapping, address, nbytes = self._reach(offer)
        runs = shifted(batch.runs, base, address, nbytes)
        events: list[Any] = []
        try:
            for number, stream in enumerate(self._streams):
                if part := runs[number :: len(self._streams)]:
                    copy_runs(self._cuda, part, stream)
                    events.append(checked(self._cuda.cudaEventCreateWithFlags(self._cuda.cudaEventDisableTiming)))
                    checked(self._cuda.cudaEventRecord(events[-1], stream))
        except RuntimeError:
            # Nobody will ask about the part that is on its way.
            try:
                for stream in self._streams:
                    self._ended(stream)
            except StillMoving:
                mapping.flying += 1
                raise
            for event in events:
                self._cuda.cudaEventDestroy(event)
            raise
        mapping.flying += 1
        return Copy(self._cuda, events, mapping)

    def reach(self, offer: str) -> int:
        """Where block 0 of the pool of that offer is in this process; mapped, if it is not yet. Raises as `submit`."""
        return self._reach(offer)[1]

    def _reach(self, offer: str) -> tuple[_Mapping, int, int]:
        """Its mapping, address here and size."""
        self._enter()
        told = Offer.read(offer)
        until, why = self._refused.get(told, (0.0, ""))
        if self.clock() < until:
            raise ValueError(why)
        mapping = self._mapped.get(told) or self._map(told)
        mapping.used_s = self.clock()
        return mapping, mapping.address + told.offset, told.nbytes

    def tidy(self) -> bool:
        """Close mappings that are idle. Whether any is left."""
        for offer, mapping in tuple(self._mapped.items()):
            if not mapping.flying and self.clock() - mapping.used_s >= IDLE_S:
                self._enter()
                del self._mapped[offer]
                self._unmap(mapping)
        return bool(self._mapped)

    def close(self) -> None:
        """Close all mappings, when nothing moves."""
        self._enter()
        for mapping in self._mapped.values():
            self._unmap(mapping)
        self._mapped.clear()
        for stream in self._streams:
            self._cuda.cudaStreamDestroy(stream)
        self._cuda.cudaFree(self._scratch)

    def _enter(self) -> None:
        checked(self._cuda.cudaSetDevice(self._device))

    def _map(self, offer: Offer) -> _Mapping:
        if offer.host != _host():
            raise ValueError("its GPU is in another host, where NVLink does not reach; use rdma or tcp")
        handle = self._cuda.cudaIpcMemHandle_t()
        ctypes.memmove(handle.getPtr(), offer.handle, _HANDLE_BYTES)
        flags = self._cuda.cudaIpcMemLazyEnablePeerAccess
        began = self.clock()
        address = int(checked(self._cuda.cudaIpcOpenMemHandle(handle, flags)))
        mapped, mapping = self.clock(), _Mapping(address, self.clock())
        try:
            gbps = self._read(address + offer.offset, min(PROBE_BYTES, offer.nbytes))
            if gbps < FLOOR_GBPS:
                why = f"its GPU is read at {gbps:.1f} GB/s, less than the {FLOOR_GBPS:g} that NVLink would do; use tcp"
                self._refuse(offer, why)
                raise ValueError(why)
        except StillMoving as error:
            # It stays mapped: what does not end may read it yet.
            why = f"its GPU was not read within {STUCK_S:g} s"
            self._refuse(offer, why)
            raise ValueError(why) from error
        except BaseException:
            self._unmap(mapping)
            raise
        _log.info(
            "mapped %.1f GiB of GPU %s in %.1f ms; read at %.0f GB/s",
            offer.nbytes / 2**30, offer.gpu[:8], (mapped - began) * 1e3, gbps,
        )  # fmt: skip
        self.gbps = min(self.gbps or gbps, gbps)
        self._mapped[offer] = mapping
        return mapping

    def _refuse(self, offer: Offer, why: str) -> None:
        now = self.clock()
        self._refused = {known: (until, said) for known, (until, said) in self._refused.items() if now < until}
        self._refused[offer] = (now + REFUSED_S, why)

    def _read(self, source: int, nbytes: int) -> float:
        """GB/s, the best of some tries."""
        cuda, stream = self._cuda, self._streams[0]
        marks = [checked(cuda.cudaEventCreate()) for _ in range(_PROBES + 1)]
        for number, mark in enumerate(marks):
            if number:
                copy_runs(cuda, [Run(source, self._scratch, nbytes)], stream)
            checked(cuda.cudaEventRecord(mark, stream))
        self._ended(stream)
        times = [float(checked(cuda.cudaEventElapsedTime(one, next_))) for one, next_ in pairwise(marks)]
        for mark in marks:
            cuda.cudaEventDestroy(mark)
        return nbytes / min(times) / 1e6

    def _ended(self, stream: Any) -> None:
        """Wait until all of a stream has ended, or failed. StillMoving: it has not within STUCK_S."""
        until, pause = self.clock() + STUCK_S, threading.Event()
        while self._cuda.cudaStreamQuery(stream)[0] == self._cuda.cudaError_t.cudaErrorNotReady:
            if self.clock() >= until:
                raise StillMoving(f"a copy to another GPU has not ended within {STUCK_S:g} s")
            pause.wait(LOOK_S)

    def _unmap(self, mapping: _Mapping) -> None:
        code = self._cuda.cudaIpcCloseMemHandle(mapping.address)[0]
        if code != self._cuda.cudaError_t.cudaSuccess:
            _log.warning("another GPU's memory could not be unmapped: %s", code.name)


def copy_runs(cuda: Any, runs: Sequence[Run], stream: Any) -> None:
    """Copies within device memory, this GPU's and mapped ones, in any order."""
    attributes = cuda.cudaMemcpyAttributes()
    attributes.srcAccessOrder = cuda.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    to, source, sizes = zip(*((run.target, run.source, run.nbytes) for run in runs), strict=True)
    checked(cuda.cudaMemcpyBatchAsync(to, source, sizes, len(runs), [attributes], [0], 1, stream))


def _host() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _index(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def _allocation(address: int) -> int:
    """Where the allocation begins that an address is in."""
    from cuda.bindings import driver

    code, base, _ = driver.cuMemGetAddressRange(address)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(code.name)
    return int(base)
