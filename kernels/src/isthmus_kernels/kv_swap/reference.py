"""Definition of the swap: blocks copied one after the other by PyTorch, on any device."""

from torch import Tensor

from isthmus_kernels.kv_swap.geometry import Direction
from isthmus_kernels.kv_swap.swap import EagerSwap, KvSwap


def _copy(direction: Direction, pool: Tensor, host: Tensor, pool_ids: Tensor, host_ids: Tensor) -> None:
    for on_pool, on_host in zip(pool_ids.tolist(), host_ids.tolist(), strict=True):
        if direction == "in":
            pool[on_pool].copy_(host[on_host])
        else:
            host[on_host].copy_(pool[on_pool])


def kv_swap(pool: Tensor, host: Tensor) -> KvSwap:
    """Bind `pool` to `host` (`KvSwap`); every swap is complete when its call returns."""
    return EagerSwap(pool, host, _copy)
