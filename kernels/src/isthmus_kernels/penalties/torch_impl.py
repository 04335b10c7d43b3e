"""Penalties in operations of PyTorch, some rows at a time: the counts take 4 bytes for each row and id."""

import torch
from torch import Tensor

_ROWS = 32


def penalize(
    logits: Tensor,
    tokens: Tensor,
    draws: Tensor,
    rows: Tensor,
    starts: Tensor,
    ends: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    *,
    most: int,
) -> None:
    """Same contract as `reference.penalize`."""
    positions = torch.arange(most, device=logits.device)
    for begin in range(0, len(draws), _ROWS):
        some = slice(begin, begin + _ROWS)
        ids = tokens[rows[some], :most].long()
        known = positions < ends[some].unsqueeze(1)
        generated = known & (positions >= starts[some].unsqueeze(1))
        empty = torch.zeros(len(ids), logits.shape[1], device=logits.device)
        seen = empty.scatter_add(1, ids, known.float()) > 0
        counts = empty.scatter_add_(1, ids, generated.float())
        values, factor = logits[draws[some]].float(), repetition[some].unsqueeze(1)
        values = torch.where(seen, torch.where(values > 0, values / factor, values * factor), values)
        values -= frequency[some].unsqueeze(1) * counts + presence[some].unsqueeze(1) * (counts > 0)
        logits.index_copy_(0, draws[some], values.to(logits.dtype))
