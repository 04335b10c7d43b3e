"""The swap between two buffers in host memory, by the compiled library (cpu/kv_swap.cpp)."""

import array
from functools import partial

from torch import Tensor

from isthmus_kernels import native
from isthmus_kernels.kv_swap.geometry import DIRECTIONS, Direction, geometry, route
from isthmus_kernels.kv_swap.swap import EagerSwap, KvSwap


def kv_swap(pool: Tensor, host: Tensor) -> KvSwap:
    """Same contract as `reference.kv_swap`."""
    what = geometry(pool, host)
    return EagerSwap(pool, host, partial(_copy, {d: array.array("q", route(what, d).shape()) for d in DIRECTIONS}))


def _copy(
    shapes: dict[Direction, "array.array[int]"],
    direction: Direction,
    pool: Tensor,
    host: Tensor,
    pool_ids: Tensor,
    host_ids: Tensor,
) -> None:
    pool_ids, host_ids = pool_ids.long(), host_ids.long()
    native.entry("kv_swap", "7q")(
        (pool, host, pool_ids, host_ids),
        shapes[direction].buffer_info()[0],
        pool.data_ptr(),
        host.data_ptr(),
        pool_ids.data_ptr(),
        host_ids.data_ptr(),
        len(pool_ids),
        int(direction == "in"),
    )
