"""The interface of a swap, and the form that copies before it returns."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from isthmus_kernels.ids import check_pairs
from isthmus_kernels.kv_swap.geometry import Direction, Geometry, geometry

Ids = Tensor | Sequence[int]
Copy = Callable[[Direction, Tensor, Tensor, Tensor, Tensor], None]


class Done(Protocol):
    """Tells when the copies of a swap are complete. A `torch.cuda.Event` is one. All raise what became of a swap that
    could not be submitted."""

    def query(self) -> bool:
        """Whether they are."""

    def synchronize(self) -> None:
        """Wait on the host."""

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Let work submitted to `stream` (default: the current one) from now on wait for it."""


class Prepared(ABC):
    """A swap whose ids change while its launch is captured in a CUDA graph: fill, then replay."""

    @abstractmethod
    def fill(self, pool_ids: Ids, host_ids: Ids) -> None:
        """Set the ids of the launches to come, at most `capacity` pairs; errors as in `KvSwap.swap_in`.

        An earlier launch must have completed: it reads the ids when it runs.
        """

    @abstractmethod
    def launch(self) -> None:
        """Submit the copies to the current stream. Captured, each replay copies what was filled before it."""

    @abstractmethod
    def close(self) -> None:
        """Free its memory; no launch or replay may follow."""


class KvSwap(ABC):
    """A pool and a host buffer, bound together once; then any number of swaps of whole blocks between them.

    `pool` and `host` are views ``[blocks, ...]`` of one block shape and dtype, with any strides. Thread-safe but
    for `close`. Both views stay alive as long as the object.
    """

    def __init__(self, pool: Tensor, host: Tensor) -> None:
        self.pool = pool
        self.host = host
        self.geometry: Geometry = geometry(pool, host)

    def swap_in(self, pool_ids: Ids, host_ids: Ids, *, after: Done | None = None) -> Done:
        """Copy block ``host_ids[i]`` of the host buffer over block ``pool_ids[i]`` of the pool, for all i.

        Args:
            pool_ids, host_ids: equal numbers of ids, int32 or int64 tensors on the CPU, or sequences. A
                destination may occur once only, a source any number of times.
            after: the copies begin when it is done. None: when everything submitted to the current stream
                before this call is.

        Returns:
            What must be waited for before the copies are used and before the sources change.

        Raises:
            ValueError: names every bad index (negative, >= number of blocks, duplicate destination); nothing
                was copied.
        """
        return self._submit("in", pool_ids, host_ids, after)

    def swap_out(self, pool_ids: Ids, host_ids: Ids, *, after: Done | None = None) -> Done:
        """Copy block ``pool_ids[i]`` of the pool over block ``host_ids[i]`` of the host buffer; see `swap_in`."""
        return self._submit("out", pool_ids, host_ids, after)

    def _check(self, direction: Direction, pool_ids: Tensor, host_ids: Tensor) -> None:
        pool = "pool_ids", pool_ids.tolist(), self.pool.shape[0]
        host = "host_ids", host_ids.tolist(), self.host.shape[0]
        src, dst = (host, pool) if direction == "in" else (pool, host)
        check_pairs("kv_swap", (src[0], dst[0]), src[1], dst[1], src[2], dst[2])

    @abstractmethod
    def _submit(self, direction: Direction, pool_ids: Ids, host_ids: Ids, after: Done | None) -> Done: ...

    @abstractmethod
    def prepare(self, direction: Direction, capacity: int) -> Prepared:
        """Return a swap of up to `capacity` blocks that a CUDA graph can capture; it copies nothing until filled."""

    @abstractmethod
    def close(self) -> None:
        """Wait for every submitted copy and free what the object owns. Idempotent."""


def as_ids(pool_ids: Ids, host_ids: Ids) -> tuple[Tensor, Tensor]:
    """Return both as contiguous tensors of one dtype, int32 or int64, on the CPU."""
    pool, host = _as_tensor("pool_ids", pool_ids), _as_tensor("host_ids", host_ids)
    if pool.dtype != host.dtype:
        pool, host = pool.long(), host.long()
    return pool.contiguous(), host.contiguous()


def _as_tensor(name: str, ids: Ids) -> Tensor:
    tensor = ids if isinstance(ids, Tensor) else torch.tensor(ids, dtype=torch.int64)
    if tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() != 1:
        raise ValueError(f"kv_swap: {name}: expected int32 or int64 [n], got {tensor.dtype} {tuple(tensor.shape)}")
    if tensor.device.type != "cpu":
        raise ValueError(f"kv_swap: {name}: ids are checked on the host, got a tensor on {tensor.device}")
    return tensor


class _Now:
    """Done already."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        pass


class EagerSwap(KvSwap):
    """Runs `copy(direction, pool, host, pool_ids, host_ids)` with checked ids on the calling thread."""

    def __init__(self, pool: Tensor, host: Tensor, copy: Copy) -> None:
        super().__init__(pool, host)
        self._copy = copy

    def _submit(self, direction: Direction, pool_ids: Ids, host_ids: Ids, after: Done | None) -> Done:
        pool_ids, host_ids = as_ids(pool_ids, host_ids)
        self._check(direction, pool_ids, host_ids)
        if after is not None:
            after.synchronize()
        self._copy(direction, self.pool, self.host, pool_ids, host_ids)
        return _Now()

    def prepare(self, direction: Direction, capacity: int) -> Prepared:
        return _PreparedEager(self, direction, capacity)

    def close(self) -> None:
        pass


class _PreparedEager(Prepared):
    def __init__(self, swap: EagerSwap, direction: Direction, capacity: int) -> None:
        self._swap = swap
        self._direction = direction
        self._capacity = capacity
        self._ids = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)

    def fill(self, pool_ids: Ids, host_ids: Ids) -> None:
        pool, host = as_ids(pool_ids, host_ids)
        check_capacity(len(pool), self._capacity)
        self._swap._check(self._direction, pool, host)
        self._ids = pool.clone(), host.clone()

    def launch(self) -> None:
        self._swap._submit(self._direction, *self._ids, None)

    def close(self) -> None:
        pass


def check_capacity(count: int, capacity: int) -> None:
    """Raise ValueError when a prepared swap is filled with more than it was made for."""
    if count > capacity:
        raise ValueError(f"kv_swap: {count} ids are more than the {capacity} that were prepared")
