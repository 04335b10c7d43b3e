"""Block copy as one gather and one scatter, with a bounded buffer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus_kernels.block_copy.reference import check_ids

_MAX_BUFFER_BYTES = 64 << 20


def block_copy(pool: Tensor, src: Sequence[int], dst: Sequence[int], *, block_dim: int = 0) -> None:
    """Same contract as `reference.block_copy`."""
    check_ids(src, dst, pool.shape[block_dim])
    if not src:
        return
    block_bytes = pool.numel() // pool.shape[block_dim] * pool.element_size()
    # Only an id in both lists needs every source read first; otherwise pieces bound the buffer.
    piece = len(src) if set(src) & set(dst) else max(1, _MAX_BUFFER_BYTES // max(1, block_bytes))
    blocks = pool.movedim(block_dim, 0)
    for begin in range(0, len(src), piece):
        source = torch.tensor(src[begin : begin + piece], device=pool.device)
        target = torch.tensor(dst[begin : begin + piece], device=pool.device)
        blocks.index_copy_(0, target, blocks.index_select(0, source))
