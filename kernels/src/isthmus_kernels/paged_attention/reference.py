"""Definition of paged attention: one request, one head at a time."""

import torch
from torch import Tensor


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
    """Attend each query of each request to its context; see the README for the formula."""
    del max_query_len, max_seq_len
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block_size, kv_heads = kv.shape[2], kv.shape[3]
    group = q.shape[1] // kv_heads
    starts = query_start_loc.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        first, last = starts[row], starts[row + 1]
        query_len = last - first
        if query_len == 0:
            continue
        tokens = torch.arange(seq_len, device=q.device)
        blocks = block_tables[row, tokens // block_size].long()
        keys = kv[blocks, 0, tokens % block_size].float()
        values = kv[blocks, 1, tokens % block_size].float()
        if scales is not None:
            keys = keys * scales[blocks, 0, tokens % block_size][..., None]
            values = values * scales[blocks, 1, tokens % block_size][..., None]
        positions = torch.arange(seq_len - query_len, seq_len, device=q.device)
        visible = tokens[None, :] <= positions[:, None]
        if window is not None:
            visible &= tokens[None, :] > positions[:, None] - window
        for head in range(q.shape[1]):
            scores = q[first:last, head].float() @ keys[:, head // group].T * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~visible, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].expand(query_len, 1)], dim=-1)
            weights = scores.softmax(dim=-1)[:, :seq_len]
            out[first:last, head] = (weights @ values[:, head // group]).to(out.dtype)
    return out
