"""Definition of the penalties."""

from torch import Tensor


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
    """See `dispatch_logits.penalize`."""
    for p, draw in enumerate(draws.tolist()):
        known = tokens[rows[p], : ends[p]].tolist()
        generated = known[int(starts[p]) :]
        values = logits[draw].float()
        for token in set(known):
            values[token] = values[token] / repetition[p] if values[token] > 0 else values[token] * repetition[p]
        for token in set(generated):
            values[token] -= frequency[p] * generated.count(token) + presence[p]
        logits[draw] = values.to(logits.dtype)
