"""What the implementations of `dispatch.lora` may rely on."""

import torch
from torch import Tensor


def check_adapters(x: Tensor, out: Tensor, slots: Tensor, a: Tensor, b: Tensor, starts: tuple[int, ...]) -> None:
    """Raise ValueError for arguments of `dispatch.lora` that do not fit together.

    LoRA: Hu et al. 2021, arXiv:2106.09685; rows of several adapters in one call as in Punica, Chen et al. 2023,
    arXiv:2310.18547.

    Args:
        x: ``[T, I]``, fp32 or bf16, rows contiguous.
        out: ``[T, O]`` of the same dtype: what the layer made of x, changed in place. Sums are fp32.
        slots: int32 ``[T]``, 0 to S: the row's adapter is number ``slots[t] - 1``; 0: none, the row of `out` is not
            touched.
        a: ``[S, P, R, I]``, contiguous, in x's dtype: R is a multiple of 4, ranks beyond an adapter's own are zero, and
            all are finite, as rows may be multiplied with 0 of an adapter that is not theirs.
        b: ``[S, R, O]``, likewise; the adapter's scale is in it.
        starts: first output of each of the P (1 to 3) parts, each with an A of its own, that make up O.
    """
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
