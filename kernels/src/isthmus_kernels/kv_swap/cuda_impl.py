"""The swap on a GPU (cuda/kv_swap.cu): a stream and a pinned staging ring for each direction."""

import array
import ctypes
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from isthmus_kernels import cuda_library
from isthmus_kernels.kv_swap.geometry import DIRECTIONS, Direction, Route, Stage, geometry, route, stage
from isthmus_kernels.kv_swap.swap import Done, Ids, KvSwap, Prepared, as_ids, check_capacity

# From here on the copy engine, which needs no multiprocessor, moves more bytes than the kernels in the time in which
# the CPU writes its descriptors (runtime/bench/LOG.md).
ENGINE_FROM = 256 << 10
# Rows of so many bytes cost it a fifth of its rate, and a decode step beside it half of what the kernels cost that.
ROWS_FROM = 8 << 10
_NEVER = 1 << 62
# What is one stretch on the host alone goes by it to staging, if so long.
STAGE_FROM = 256 << 10
# Device memory of a direction for it: four slots of 8 MiB.
STAGE_BYTES = 32 << 20
# Pinned bytes of a direction: 131,000 pairs of ids in flight. A submission that finds them all in use waits.
STAGING_BYTES = 1 << 20

# The copy engine is told of each block, which takes the CPU longer than to wake a thread that does it.
HAND_OVER_FROM = 8

_P, _N = ctypes.c_void_p, ctypes.c_int64
_ENTRIES: Mapping[str, tuple[Any, ...]] = {
    "submit": (_P, _N, _P, _P, _N, _N, _P, _P),
    "query": (_P, _N, _N),
    "synchronize": (_P, _N, _N),
    "wait": (_P, _N, _N, _P),
    "failed": (_P, _N, _P),
}

_BAD_IDS, _NOT_PINNED, _OUT_OF_MEMORY, _NOT_YET, _NO_THREAD, _CAPTURED = -1, -2, -3, -4, -5, -6


def kv_swap(
    pool: Tensor,
    host: Tensor,
    *,
    spare_multiprocessors: bool = True,
    engine_from: int = ENGINE_FROM,
    rows_from: int | None = None,
    stage_from: int = STAGE_FROM,
    stage_bytes: int | None = None,
    multiprocessors: Mapping[Direction, int] | None = None,
    rates: Mapping[Direction, int] | None = None,
    hand_over_from: int | None = None,
    staging_bytes: int = STAGING_BYTES,
) -> KvSwap:
    """Same contract as `reference.kv_swap`, but a swap returns when it is in line. Its order with what the current
    stream was given before is settled then; a swap that cannot be submitted after all fails at whoever waits for it,
    and so do those after it.

    Args:
        pool: on a GPU of compute capability 9.0 or later.
        host: in pinned memory.
        spare_multiprocessors: for swaps beside a model's kernels: the copy engine moves what it can, also where it is
            slower, and kernels leave the link some room. False fills the link, whatever that does to others (README).
        engine_from: contiguous stretches of at least so many bytes go to the copy engine.
        rows_from: and so do rows of so many at one distance. Default: 8 KiB to spare multiprocessors, else none.
        stage_from: a swap whose stretches of host memory have so many bytes on average goes through staging.
        stage_bytes: cap on the device memory for that, for each direction; 0: no swap goes through it. Default: 0 to
            spare multiprocessors, else 32 MiB.
        multiprocessors: how many the kernels use that read or write host memory, by direction; what it leaves out is
            `geometry.route`'s choice.
        rates: MB/s that these kernels hold themselves to, by direction; 0: as fast as they go.
        hand_over_from: swaps of at least so many blocks are submitted by a thread of the library, which holds no
            interpreter lock. Default: 8 where the copy engine is told of each block, else none, since a kernel is
            launched as fast as a thread is woken.
        staging_bytes: cap on the pinned memory for ids, for each direction.
    """
    what = geometry(pool, host)
    routes = {direction: route(what, direction, spare=spare_multiprocessors) for direction in DIRECTIONS}
    for direction, count in (multiprocessors or {}).items():
        routes[direction] = replace(routes[direction], multiprocessors=count)
    for direction, rate in (rates or {}).items():
        routes[direction] = replace(routes[direction], rate=rate)
    if stage_bytes is None:
        stage_bytes = 0 if spare_multiprocessors else STAGE_BYTES
    if rows_from is None:
        rows_from = ROWS_FROM if spare_multiprocessors else _NEVER
    if hand_over_from is None:
        by_block = stage_bytes > 0 or what.fragment >= min(engine_from, rows_from)
        hand_over_from = HAND_OVER_FROM if by_block else _NEVER
    return CudaSwap(
        pool,
        host,
        routes,
        {direction: stage(what, direction, stage_bytes) for direction in DIRECTIONS},
        Thresholds(engine=engine_from, rows=rows_from, stage=stage_from, hand_over=hand_over_from),
        staging_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """From how many bytes on something goes by the copy engine: stretches, rows, and stretches of host memory alone;
    and from how many blocks on a swap is submitted by a thread."""

    engine: int = ENGINE_FROM
    rows: int = _NEVER
    stage: int = STAGE_FROM
    hand_over: int = _NEVER


class CudaSwap(KvSwap):
    """Submits to streams of its own, two for each direction, of the device's highest priority."""

    def __init__(
        self,
        pool: Tensor,
        host: Tensor,
        routes: dict[Direction, Route],
        stages: dict[Direction, Stage | None],
        thresholds: Thresholds,
        staging_bytes: int,
    ) -> None:
        super().__init__(pool, host)
        if host.device.type != "cpu":
            raise ValueError(f"kv_swap: host: expected a tensor in host memory, got one on {host.device}")
        if staging_bytes < 4096:
            raise ValueError(f"kv_swap: staging_bytes: {staging_bytes} is less than 4096")
        lib = cuda_library.library()
        assert lib is not None, "dispatch chose this implementation without the library"
        self._lib = lib
        for name, takes in _ENTRIES.items():
            entry = getattr(lib, f"isthmus_kv_swap_{name}")
            entry.argtypes, entry.restype = takes, _N
        self._give = lib.isthmus_kv_swap_submit
        config = array.array("q", [number for direction in DIRECTIONS for number in routes[direction].pack()])
        slots = []
        for direction in DIRECTIONS:
            way = stages[direction]
            if way is None:
                config.extend(Stage(route=routes[direction], slots=0, slot_blocks=0).pack(0))
            else:
                slots.append(torch.empty(way.nbytes, dtype=torch.uint8, device=pool.device))
                config.extend(way.pack(slots[-1].data_ptr()))
        # For each direction, the stream on which it ends, the one on which a staged swap begins, and one that waits for
        # what the caller names. 0 is the lowest priority; the device clamps what is higher than it has.
        streams = {
            direction: tuple(torch.cuda.Stream(pool.device, priority=-5) for _ in range(3)) for direction in DIRECTIONS
        }
        config.extend((pool.data_ptr(), host.data_ptr(), pool.shape[0], host.shape[0], pool.device.index))
        config.extend(stream.cuda_stream for direction in DIRECTIONS for stream in streams[direction][:2])
        config.extend((thresholds.engine, thresholds.rows, thresholds.stage, thresholds.hand_over, staging_bytes))
        everyone = [stream for some in streams.values() for stream in some]
        for stream in everyone:
            stream.wait_stream(torch.cuda.current_stream(pool.device))  # which may still use what the slots were before
        handle = ctypes.c_void_p()
        code = lib.isthmus_kv_swap_open(ctypes.c_void_p(config.buffer_info()[0]), ctypes.byref(handle))
        _explain(code, "kv_swap: cannot open")
        self._handle = handle
        self._index = pool.device.index
        self._gates = {direction: streams[direction][2] for direction in DIRECTIONS}
        self._failures: dict[int, tuple[int, int]] = {}
        self._finalizer = weakref.finalize(self, _close, lib, handle, everyone, slots, self._failures)

    def _submit(self, direction: Direction, pool_ids: Ids, host_ids: Ids, after: Done | None) -> Done:
        assert self._finalizer.alive, "kv_swap: closed"
        pool_ids, host_ids = as_ids(pool_ids, host_ids)
        count = pool_ids.numel()
        if count != host_ids.numel():
            self._check(direction, pool_ids, host_ids)
        if after is None:
            # torch's object for a stream takes 3.5 us to make, a fifth of the submission of a block.
            before = torch._C._cuda_getCurrentRawStream(self._index)
        else:
            if torch.cuda.is_current_stream_capturing():
                _explain(_CAPTURED, "kv_swap")
            gate = self._gates[direction]
            after.wait(gate)
            before = gate.cuda_stream
        way = DIRECTIONS.index(direction)
        turn = ctypes.c_int64()
        code = self._give(
            self._handle,
            way,
            pool_ids.data_ptr(),
            host_ids.data_ptr(),
            pool_ids.itemsize,
            count,
            before,
            ctypes.byref(turn),
        )
        if code:
            self._raise(code, direction, pool_ids, host_ids)
        return _Turn(self, way, turn.value)

    def _ask(self, what: str, way: int, turn: int, *arguments: int) -> bool:
        """Whether that turn's copies have ended, or `what` has been done about it. Raises what became of it."""
        if self._finalizer.alive:
            code = getattr(self._lib, f"isthmus_kv_swap_{what}")(self._handle, way, turn, *arguments)
        else:
            code, first = self._failures.get(way, (0, 0))
            code = code if turn >= first else 0
        if code == _NOT_YET:
            return False
        _explain(code, "kv_swap: a swap failed, and all after it; close this and open another")
        return True

    def _raise(self, code: int, direction: Direction, pool_ids: Tensor, host_ids: Tensor) -> None:
        if code == _BAD_IDS:
            self._check(direction, pool_ids, host_ids)
            raise AssertionError("kv_swap: the library refused ids that are good")
        _explain(code, "kv_swap: cannot submit")

    def prepare(self, direction: Direction, capacity: int) -> Prepared:
        return _PreparedCuda(self, self._lib, self._handle, direction, capacity)

    def close(self) -> None:
        self._finalizer()


@dataclass(slots=True)  # frozen, it would take three times as long to make
class _Turn:
    """`Done` of a swap that may still be on its way to the driver."""

    swap: CudaSwap
    way: int
    turn: int

    def query(self) -> bool:
        """Whether its copies have ended."""
        return self.swap._ask("query", self.way, self.turn)

    def synchronize(self) -> None:
        """Wait for them."""
        self.swap._ask("synchronize", self.way, self.turn)

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Returns once the swap is submitted."""
        waiting = stream or torch.cuda.current_stream(self.swap.pool.device)
        self.swap._ask("wait", self.way, self.turn, waiting.cuda_stream)


class _PreparedCuda(Prepared):
    def __init__(
        self, swap: CudaSwap, lib: ctypes.CDLL, owner: ctypes.c_void_p, direction: Direction, capacity: int
    ) -> None:
        self._swap = swap
        self._lib = lib
        self._direction = direction
        self._capacity = capacity
        self._handle = ctypes.c_void_p()
        code = lib.isthmus_kv_swap_prepare(
            owner, ctypes.c_int64(DIRECTIONS.index(direction)), ctypes.c_int64(capacity), ctypes.byref(self._handle)
        )
        _explain(code, f"kv_swap: cannot prepare {capacity} blocks")
        self._finalizer = weakref.finalize(self, lib.isthmus_kv_swap_release, self._handle)

    def fill(self, pool_ids: Ids, host_ids: Ids) -> None:
        pool_ids, host_ids = as_ids(pool_ids, host_ids)
        check_capacity(len(pool_ids), self._capacity)
        if len(pool_ids) != len(host_ids):
            self._swap._check(self._direction, pool_ids, host_ids)
        code = self._lib.isthmus_kv_swap_fill(
            self._handle,
            ctypes.c_void_p(pool_ids.data_ptr()),
            ctypes.c_void_p(host_ids.data_ptr()),
            ctypes.c_int64(pool_ids.element_size()),
            ctypes.c_int64(len(pool_ids)),
        )
        if code:
            self._swap._raise(code, self._direction, pool_ids, host_ids)

    def launch(self) -> None:
        stream = torch.cuda.current_stream(self._swap.pool.device)
        code = self._lib.isthmus_kv_swap_launch(self._handle, ctypes.c_void_p(stream.cuda_stream))
        _explain(code, "kv_swap: cannot launch")

    def close(self) -> None:
        self._finalizer()


def _explain(code: int, doing: str) -> None:
    if code == _NOT_PINNED:
        raise ValueError("kv_swap: host: the buffer is not in pinned memory; allocate it with pin_memory=True")
    if code == _OUT_OF_MEMORY:
        raise MemoryError(f"{doing}: no host memory")
    if code == _NO_THREAD:
        raise RuntimeError(f"{doing}: the system gives this process no more threads")
    if code == _CAPTURED:
        raise RuntimeError("kv_swap: ids of a swap cannot change in a captured graph; capture a prepare()d one")
    cuda_library.check(code, doing)
    assert code == 0, f"{doing}: unknown code {code}"


def _close(
    lib: ctypes.CDLL,
    handle: ctypes.c_void_p,
    streams: list[torch.cuda.Stream],
    slots: list[Tensor],
    failures: dict[int, tuple[int, int]],
) -> None:
    lib.isthmus_kv_swap_stop(handle)
    for stream in streams:
        stream.synchronize()
    first = ctypes.c_int64()
    for way in range(len(DIRECTIONS)):
        if code := lib.isthmus_kv_swap_failed(handle, way, ctypes.byref(first)):
            failures[way] = (code, first.value)  # for who asks later
    lib.isthmus_kv_swap_close(handle)
    slots.clear()  # after every use of theirs has ended
