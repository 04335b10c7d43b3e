"""Masks over logits in a few operations of PyTorch."""

import torch
from torch import Tensor


def mask_logits(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Same contract as `reference.mask_logits`."""
    size = logits.shape[1]
    bits = torch.arange(8, dtype=torch.uint8, device=masks.device)
    refused = (masks.unsqueeze(2).bitwise_right_shift(bits).bitwise_and_(1) == 0).flatten(1)
    if refused.shape[1] < size:
        refused = torch.nn.functional.pad(refused, (0, size - refused.shape[1]), value=True)
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(refused[:, :size], float("-inf")))
