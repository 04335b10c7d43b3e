"""Sampling as whole-batch PyTorch operations; filters share one sort, which is skipped if unused."""

import torch
from torch import Tensor

from isthmus_kernels.sampling.noise import gumbel


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
    greedy = torch.argmax(logits, dim=-1)
    if temperature is None:
        return greedy if out is None else out.copy_(greedy)
    assert seeds is not None and positions is not None
    vocab = logits.shape[1]
    z = logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
    z = z.masked_fill(z.isnan(), float("-inf"))  # what is no number has no place in an order, nor an index there
    keep = torch.isfinite(z)
    # So cold that scores overflow: all but the largest logit are out of reach of any noise.
    random = (temperature > 0) & torch.isfinite(z.amax(dim=-1))
    if min_p is not None:
        # log(0) = -inf switches the filter off for that row.
        keep &= z >= z.amax(dim=-1, keepdim=True) + min_p.log()[:, None]
    if top_k is not None or top_p is not None:
        ranked = z.sort(dim=-1, descending=True).values
        if top_k is not None:
            count = torch.where((top_k > 0) & (top_k < vocab), top_k.long(), vocab)
            keep &= z >= ranked.gather(1, count[:, None] - 1)
        if top_p is not None:
            lowest = z.masked_fill(~keep, float("inf")).amin(dim=-1, keepdim=True)
            kept = ranked.masked_fill(ranked < lowest, float("-inf"))
            probs = kept.softmax(dim=-1)
            before = probs.cumsum(dim=-1) - probs
            # Equal logits stand or fall together, so each takes the mass before the first of its run.
            first = torch.searchsorted(-ranked, -ranked)
            inside = before.gather(1, first) < top_p.clamp_min(1e-30)[:, None]
            inside |= (top_p >= 1.0)[:, None]
            keep &= z >= ranked.masked_fill(~inside, float("inf")).amin(dim=-1, keepdim=True)
    noisy = (z + gumbel(seeds, positions, vocab)).masked_fill(~keep, float("-inf"))
    choice = torch.where(random, noisy.argmax(dim=-1), greedy)
    return choice if out is None else out.copy_(choice)
