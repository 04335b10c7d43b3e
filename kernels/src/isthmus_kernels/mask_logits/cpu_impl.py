"""Masks over logits on CPU through the compiled library (cpu/mask_logits.cpp)."""

import torch
from torch import Tensor

from isthmus_kernels import native


def mask_logits(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Same contract as `reference.mask_logits`."""
    if logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits: expected [S, V] with contiguous rows, got shape {tuple(logits.shape)}")
    if rows.dtype != torch.int64 or not rows.is_contiguous():
        raise ValueError(f"rows: expected contiguous int64 [M], got {rows.dtype} {tuple(rows.shape)}")
    if masks.dtype != torch.uint8 or masks.shape[0] != len(rows) or not masks.is_contiguous():
        raise ValueError(f"masks: expected contiguous uint8 [{len(rows)}, W], got {masks.dtype} {tuple(masks.shape)}")
    native.entry("mask_logits", "8q")(
        (logits, rows, masks),
        logits.data_ptr(),
        rows.data_ptr(),
        masks.data_ptr(),
        len(rows),
        logits.shape[1],
        masks.shape[1],
        logits.stride(0),
        native.dtype_code(logits.dtype, "logits"),
    )
