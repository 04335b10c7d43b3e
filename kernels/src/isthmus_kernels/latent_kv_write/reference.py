"""Definition of the rotary embedding and KV write of latent attention."""

import torch
from torch import Tensor


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def latent_kv_write(
    q: Tensor, row: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, slot_mapping: Tensor
) -> None:
    """Rotate `q` and the end of `row` in place, and write `row` to the pool; see the README."""
    cos_t, sin_t = cos[positions], sin[positions]
    q.copy_(_rotate(q, cos_t[:, None], sin_t[:, None]))
    turned = row[:, row.shape[1] - 2 * cos.shape[1] :]
    turned.copy_(_rotate(turned, cos_t, sin_t))
    block_size = kv.shape[2]
    rows = kv[:, 0, :, 0]
    keep = slot_mapping >= 0
    # A token that is not written puts back what the first slot holds: a choice of rows would wait for the device.
    slots = torch.where(keep, slot_mapping, 0)
    blocks, offsets = slots // block_size, slots % block_size
    rows[blocks, offsets] = torch.where(keep[:, None], row.to(kv.dtype), rows[0, 0])
