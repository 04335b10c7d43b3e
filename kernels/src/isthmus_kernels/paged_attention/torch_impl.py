"""Paged attention as whole-batch PyTorch operations: the fallback where nothing is compiled.

Requests are padded to the longest query and context, so time and memory are those of the
longest request times the batch. No host synchronisation, no loop over requests.
"""

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
    """Same contract as `reference.paged_attention`."""
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block_size, kv_heads, dim = kv.shape[2], kv.shape[3], kv.shape[4]
    heads = q.shape[1]
    rows = block_tables.shape[0]
    if rows == 0 or max_query_len == 0 or max_seq_len == 0:
        return out
    group = heads // kv_heads
    starts = query_start_loc[:-1].long()
    lens = query_start_loc[1:].long() - starts
    seq = seq_lens.long()

    token = torch.arange(max_seq_len, device=q.device)
    in_context = token[None, :] < seq[:, None]
    # Table entries past the context are unspecified, so they must not be followed.
    ids = torch.where(in_context, block_tables.long()[:, token // block_size], 0)
    offset = (token % block_size).expand(rows, -1)
    hide = ~in_context[:, :, None, None]
    keys, values = kv[ids, 0, offset].float(), kv[ids, 1, offset].float()
    if scales is not None:
        keys, values = keys * scales[ids, 0, offset][..., None], values * scales[ids, 1, offset][..., None]
    keys, values = keys.masked_fill(hide, 0.0), values.masked_fill(hide, 0.0)

    index = torch.arange(max_query_len, device=q.device)
    live = index[None, :] < lens[:, None]
    flat = torch.where(live, starts[:, None] + index, 0)
    queries = q[flat].float().masked_fill(~live[:, :, None, None], 0.0)
    queries = queries.view(rows, max_query_len, kv_heads, group, dim)

    position = (seq - lens)[:, None] + index
    visible = (token <= position[:, :, None]) & in_context[:, None, :]
    if window is not None:
        visible &= token > position[:, :, None] - window
    scores = torch.einsum("rqhgd,rkhd->rhgqk", queries, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    # Padding queries see nothing; softmax of all -inf is NaN, which is never stored.
    if sinks is not None:
        sink = sinks.view(1, kv_heads, group, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., :max_seq_len]
    result = torch.einsum("rhgqk,rkhd->rqhgd", weights, values).reshape(rows, max_query_len, heads, dim)
    out[flat[live]] = result[live].to(out.dtype)
    return out
