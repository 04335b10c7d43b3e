"""Definition of sampling: one request at a time, by sorting. See the README for the maths."""

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
    """Choose one token id per row of `logits`; see `dispatch_logits.sample` for the arguments."""
    rows, vocab = logits.shape
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    for row in range(rows):
        if temperature is None or float(temperature[row]) == 0.0:
            out[row] = logits[row].argmax()
            continue
        assert seeds is not None and positions is not None
        z = logits[row].float() / temperature[row]
        if not torch.isfinite(z.max()):
            # So cold that scores overflow: all but the largest logit are out of reach of any noise.
            out[row] = logits[row].argmax()
            continue
        keep = torch.isfinite(z)
        if min_p is not None and float(min_p[row]) > 0.0:
            keep &= z >= z.max() + torch.log(min_p[row])
        if top_k is not None and 0 < int(top_k[row]) < vocab:
            keep &= z >= z.sort(descending=True).values[int(top_k[row]) - 1]
        if top_p is not None and float(top_p[row]) < 1.0:
            probs = z.masked_fill(~keep, float("-inf")).double().softmax(dim=-1)
            order = z.argsort(descending=True, stable=True)
            mass_above = {}
            total, index = 0.0, 0
            while index < vocab:
                value = z[order[index]].item()
                mass_above[value] = total
                while index < vocab and z[order[index]].item() == value:
                    total += probs[order[index]].item()
                    index += 1
            for token in range(vocab):
                if mass_above[z[token].item()] >= max(float(top_p[row]), 1e-30):
                    keep[token] = False
        noise = gumbel(seeds[row : row + 1], positions[row : row + 1], vocab)[0]
        out[row] = (z + noise).masked_fill(~keep, float("-inf")).argmax()
    return out


def logprobs(logits: Tensor, tokens: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (chosen [B], rank [B], top ids [B, n], top log-probabilities [B, n]) of raw logits."""
    scores = logits.float().log_softmax(dim=-1)
    chosen = scores.gather(1, tokens[:, None])
    # The best token has rank 1; equal logits share the better rank. Of the logits: rounding makes more scores equal.
    rank = (logits > logits.gather(1, tokens[:, None])).sum(dim=-1) + 1
    top, ids = scores.topk(top_n, dim=-1)
    return chosen[:, 0], rank, ids, top
