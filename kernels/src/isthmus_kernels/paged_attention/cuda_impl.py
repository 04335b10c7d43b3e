"""Paged attention on Hopper: prefill by cuda/prefill.cuh, made for its matrix units; decode as in `triton_impl`.

What the kernel was not written for (see `refusal`) goes to Triton as a whole; the log says so once for each reason.
"""

import ctypes
import logging
import struct
from functools import cache

import torch
from torch import Tensor

from isthmus_kernels import batch_invariance, cuda_library
from isthmus_kernels.device import multiprocessors, scratch
from isthmus_kernels.paged_attention import triton_impl
from isthmus_kernels.paged_attention.triton_decode import decode
from isthmus_kernels.paged_attention.triton_tile import LOG2E

_LOG = logging.getLogger(__name__)
# As the kernel has them (prefill_layout.h): rows of (query, head) and keys of a tile, channels of a head.
_ROWS, _KEYS, _DIM = 128, 128, 128
_DTYPES = (torch.bfloat16, torch.float16)
_CALL = struct.Struct("26qd")


def paged_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Same contract as `reference.paged_attention`."""
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if 0 in {q.shape[0], block_tables.shape[0], max_query_len, max_seq_len}:
        return out
    reason = None if max_query_len == 1 else refusal(q, kv, out, window=window, softcap=softcap, sinks=sinks)
    if max_query_len == 1 or reason is not None:
        if reason is not None:
            _log_refusal(reason)
        return triton_impl.paged_attention(
            q,
            kv,
            block_tables,
            query_start_loc,
            seq_lens,
            scale=scale,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            window=window,
            softcap=softcap,
            sinks=sinks,
            scales=scales,
            out=out,
        )
    batch = (q, kv, block_tables, query_start_loc, seq_lens, out)
    decode(*batch, scale=scale, window=None, softcap=None, sinks=None, scales=None)
    prefill(*batch, scale=scale)
    return out


def refusal(
    q: Tensor, kv: Tensor, out: Tensor, *, window: int | None, softcap: float | None, sinks: Tensor | None
) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    if batch_invariance.required(q.device):
        return "results may not depend on the batch"
    if window is not None or softcap is not None or sinks is not None:
        return "window, soft cap or sinks"
    if q.shape[2] != _DIM:
        return f"head_dim {q.shape[2]}, not {_DIM}"
    if q.dtype not in _DTYPES or kv.dtype != q.dtype:
        return f"queries of {q.dtype} over keys of {kv.dtype}"
    block_size = kv.shape[2]
    if block_size < 8 or block_size & (block_size - 1):
        return f"block size {block_size}, not a power of two from 8 on"
    if q.shape[1] // kv.shape[3] > _ROWS:
        return f"{q.shape[1] // kv.shape[3]} query heads of a kv head, more than {_ROWS}"
    if torch.cuda.get_device_capability(q.device) != (9, 0):
        return "a device that is not of compute capability 9.0"
    # The copy engine and the stores move 16 bytes.
    strides = (*q.stride()[:2], *out.stride()[:2], *kv.stride()[:4])
    if any(stride % 8 for stride in strides) or q.stride(2) != 1 or out.stride(2) != 1:
        return "rows that do not begin at multiples of 16 bytes"
    if any(tensor.data_ptr() % 16 for tensor in (q, kv, out)):
        return "memory that does not begin at a multiple of 16 bytes"
    return None


@cache
def _log_refusal(reason: str) -> None:
    _LOG.info("paged_attention on cuda: prefill by triton (%s)", reason)


def prefill(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    *,
    scale: float,
) -> None:
    """Write `out` for the requests that have more than one query; the others are left alone."""
    lib = cuda_library.library()
    assert lib is not None, "dispatch chose this implementation without the library"
    requests = block_tables.shape[0]
    tokens, heads, _ = q.shape
    blocks, _, block_size, kv_heads, _ = kv.shape
    # Each request may leave one tile partly filled.
    tiles = min(tokens // (_ROWS * kv_heads // heads) + requests, tokens)
    counter = scratch("prefill tiles", q.device, (2,), torch.int32)
    keys, values = kv[:, 0], kv[:, 1]
    call = _CALL.pack(
        *(tensor.data_ptr() for tensor in (out, q, keys, values, block_tables, query_start_loc, seq_lens, counter)),
        *(tokens, heads, kv_heads, requests, blocks, block_size),
        *(*q.stride()[:2], *out.stride()[:2]),
        *(kv.stride(0), kv.stride(2), kv.stride(3), block_tables.stride(0)),
        *(q.dtype == torch.float16, tiles * kv_heads),
        *(q.device.index, multiprocessors(q.device)),
        scale * LOG2E,
    )
    stream = ctypes.c_void_p(torch.cuda.current_stream(q.device).cuda_stream)
    cuda_library.check(lib.isthmus_paged_prefill(call, stream), "paged_attention: cannot launch the prefill kernel")
