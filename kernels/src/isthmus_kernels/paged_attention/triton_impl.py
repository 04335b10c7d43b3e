"""Paged attention on a GPU: requests with one query go to `triton_decode`, the others to `triton_prefill`.

Each kernel finds its requests on the device, and its grid depends on bounds only, so a captured graph can be replayed
with any lengths.
"""

import torch
from torch import Tensor

from isthmus_kernels import batch_invariance
from isthmus_kernels.paged_attention.triton_decode import decode
from isthmus_kernels.paged_attention.triton_prefill import prefill


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
    batch = (q, kv, block_tables, query_start_loc, seq_lens, out)
    if batch_invariance.required(q.device):
        prefill(*batch, scale=scale, window=window, softcap=softcap, sinks=sinks, scales=scales, alike=True)
        return out
    decode(*batch, scale=scale, window=window, softcap=softcap, sinks=sinks, scales=scales)
    if max_query_len > 1:
        prefill(*batch, scale=scale, window=window, softcap=softcap, sinks=sinks, scales=scales)
    return out
