"""Decode attention of many rows on Hopper by cuda/decode.cuh: one query a request."""

import ctypes
import struct

import torch
from torch import Tensor

from isthmus_kernels import cuda_library
from isthmus_kernels.device import multiprocessors, scratch
from isthmus_kernels.paged_attention.triton_tile import LOG2E

# As the kernel has them (decode_layout.h, decode.cu): query heads of a kv head and requests at most, programs of a
# multiprocessor, and numbers that each lane of one leaves of an unfinished part.
_HEADS, _REQUESTS, _PROGRAMS, _SUMS = 8, 512, 8, 32
_CALL = struct.Struct("25qd")
LEAST_REQUESTS = 128
"""With fewer the Triton kernel is as fast or faster, and a step is not bounded by power (runtime/bench/LOG.md)."""
LONGEST = 65_536
"""Tokens of a request that a table has room for. Parts of one request are merged one after the other, which of one long
request among many short ones takes longer than Triton's kernel."""


def takes(q: Tensor, kv: Tensor, block_tables: Tensor) -> bool:
    """Whether the kernel is the faster one for such a batch, of what `cuda_impl.refusal` lets pass."""
    requests, width = block_tables.shape
    fits = q.shape[1] <= _HEADS * kv.shape[3] and width * kv.shape[2] <= LONGEST
    return fits and LEAST_REQUESTS <= requests <= _REQUESTS


def decode(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    *,
    scale: float,
) -> None:
    """Write `out` for the requests that have exactly one query; the others are left alone."""
    lib = cuda_library.library()
    assert lib is not None, "dispatch chose this implementation without the library"
    block_size, kv_heads = kv.shape[2:4]
    programs = _PROGRAMS * multiprocessors(q.device)
    partial = scratch("decode sums", q.device, (2 * programs, _SUMS, 32), torch.float32)
    stats = scratch("decode lanes", q.device, (2 * programs, 32, 4), torch.float32)
    arrived = scratch("decode parts", q.device, (programs,), torch.int32)
    tensors = (out, q, kv, block_tables, query_start_loc, seq_lens, partial, stats, arrived)
    call = _CALL.pack(
        *(tensor.data_ptr() for tensor in tensors),
        *(q.shape[1], kv_heads, block_tables.shape[0], block_size),
        *(*q.stride()[:2], *out.stride()[:2]),
        *(*kv.stride()[:4], block_tables.stride(0)),
        *(q.dtype == torch.float16, q.device.index, multiprocessors(q.device)),
        scale * LOG2E,
    )
    stream = ctypes.c_void_p(torch.cuda.current_stream(q.device).cuda_stream)
    cuda_library.check(lib.isthmus_paged_decode(call, stream), "paged_attention: cannot launch the decode kernel")
