"""What the implementations of `dispatch.lora` may rely on."""

import torch
from torch import Tensor


def check_adapters(x: Tensor, out: Tensor, slots: Tensor, a: Tensor, b: Tensor, starts: tuple[int, ...]) -> None:
    """Raise ValueError for arguments that do not fit together."""
    count, parts, rank, inputs = a.shape
    if not 1 <= parts <= 3 or rank % 4 or len(starts) != parts or starts[0] != 0 or not a.is_contiguous():
        raise ValueError(f"a: expected [S, 1 to 3, a multiple of 4, I] and as many starts, got {tuple(a.shape)}")
    if b.shape != (count, rank, out.shape[1]) or not b.is_contiguous():
        raise ValueError(f"b: expected a contiguous [{count}, {rank}, {out.shape[1]}], got {tuple(b.shape)}")
    rows = len(slots)
    for name, tensor, shape in (("x", x, (rows, inputs)), ("out", out, (rows, b.shape[2]))):
        if tensor.shape != shape or tensor.stride(1) != 1 or tensor.dtype != a.dtype:
            raise ValueError(
                f"{name}: expected {a.dtype} {shape} with contiguous rows, got {tensor.dtype} {tuple(tensor.shape)}"
            )
    if b.dtype != a.dtype or slots.dtype != torch.int32:
        raise ValueError(f"b, slots: expected {a.dtype} and int32, got {b.dtype} and {slots.dtype}")
