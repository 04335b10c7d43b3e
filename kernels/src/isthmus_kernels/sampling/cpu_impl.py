"""Sampling on CPU through the compiled library (cpu/sample.cpp)."""

import torch
from torch import Tensor

from isthmus_kernels import native


def sample(
    logits: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Same contract as `reference.sample`."""
    rows, vocab = logits.shape
    # Not converted: PyTorch's threads would take the processors of the library's (cpu/pool.cpp), and spin after it.
    scores = logits if logits.dtype in native.DTYPES else logits.float()
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    if out is None:
        out = torch.empty(rows, dtype=torch.int64)

    def address(name: str, tensor: Tensor | None, dtype: torch.dtype) -> int:
        if tensor is None:
            return 0
        if tensor.shape != (rows,) or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name}: expected {dtype} [{rows}], got {tensor.dtype} {list(tensor.shape)}")
        return tensor.data_ptr()

    native.entry("sample", "12q")(
        (out, scores, temperature, top_k, top_p, min_p, seeds, positions),
        address("out", out, torch.int64),
        scores.data_ptr(),
        address("temperature", temperature, torch.float32),
        address("top_k", top_k, torch.int32),
        address("top_p", top_p, torch.float32),
        address("min_p", min_p, torch.float32),
        address("seeds", seeds, torch.int64),
        address("positions", positions, torch.int64),
        rows,
        vocab,
        scores.stride(0),
        native.dtype_code(scores.dtype, "logits"),
    )
    return out
