"""Paged attention by FlashInfer, where it is installed: a peer to compare with, for who asks for it by name.

FlashInfer plans a batch on the host (Ye et al. 2025, arXiv:2501.01005), so a call reads the lengths back, waits for the
device, and cannot be captured in a graph. It compiles its kernels where it runs.
"""

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from isthmus_kernels.device import scratch

_WORKSPACE = 256 << 20


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
    """Same contract as `reference.paged_attention`, but for sinks and scales, which raise ValueError."""
    if sinks is not None:
        raise ValueError("sinks: FlashInfer's paged wrapper has none; leave impl out")
    if scales is not None:
        raise ValueError("scales: FlashInfer's paged wrapper has one scale for all keys; leave impl out")
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("FlashInfer plans on the host, which a captured graph cannot do; leave impl out")
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    rows = [row for row in range(len(lens)) if starts[row + 1] > starts[row]]
    if not rows:
        return out
    block_size = kv.shape[2]
    blocks = [-(-lens[row] // block_size) for row in rows]
    ids = torch.cat([block_tables[row, :count] for row, count in zip(rows, blocks, strict=True)])
    wrapper = _wrapper(q.device)
    wrapper.plan(
        # Requests without queries lie between others, and leave no gap: their starts are equal.
        torch.tensor([*(starts[row] for row in rows), starts[-1]], dtype=torch.int32),
        torch.tensor([0, *blocks], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        ids,
        torch.tensor([(lens[row] - 1) % block_size + 1 for row in rows], dtype=torch.int32),
        q.shape[1],
        kv.shape[3],
        q.shape[2],
        block_size,
        causal=True,
        sm_scale=scale,
        window_left=-1 if window is None else window - 1,
        logits_soft_cap=softcap,
        q_data_type=q.dtype,
        kv_data_type=kv.dtype,
    )
    first, last = starts[rows[0]], starts[-1]
    wrapper.run(q[first:last].contiguous(), kv, out=out[first:last])
    return out


@cache
def _wrapper(device: torch.device) -> Any:
    space = scratch("flashinfer workspace", device, (_WORKSPACE,), torch.uint8)
    return import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(space, "NHD")
