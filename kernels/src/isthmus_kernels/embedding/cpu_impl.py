"""Embedding on CPU through the compiled library (cpu/embedding.cpp)."""

import torch
from torch import Tensor

from isthmus_kernels import native


def _explain(code: int, kept: native.Kept) -> Exception:
    table, ids = kept[1], kept[2]
    assert table is not None and ids is not None
    return IndexError(f"ids[{code - 1}] = {int(ids[code - 1])} is outside the table's {table.shape[0]} rows")


def embedding(table: Tensor, ids: Tensor, *, scale: float = 1.0, out: Tensor) -> Tensor:
    """Same contract as `reference.embedding`."""
    if table.dim() != 2 or not table.is_contiguous():
        raise ValueError(f"table: expected a contiguous [V, H], got shape {tuple(table.shape)}")
    if ids.dim() != 1 or ids.dtype != torch.int32 or not ids.is_contiguous():
        raise ValueError(f"ids: expected contiguous int32 [T], got {ids.dtype} {tuple(ids.shape)}")
    if out.shape != (ids.shape[0], table.shape[1]) or out.stride(1) != 1:
        raise ValueError(f"out: expected [{ids.shape[0]}, {table.shape[1]}], got {tuple(out.shape)}")
    native.entry("embedding", "7qd2q", _explain)(
        (out, table, ids),
        out.data_ptr(),
        table.data_ptr(),
        ids.data_ptr(),
        ids.shape[0],
        table.shape[0],
        table.shape[1],
        out.stride(0),
        scale,
        native.dtype_code(out.dtype, "out"),
        native.dtype_code(table.dtype, "table"),
    )
    return out
