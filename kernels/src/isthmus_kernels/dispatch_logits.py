"""The ops on logits: what changes them, draws from them and tells of them. Chosen and promised as in `dispatch`."""

from torch import Tensor

from isthmus_kernels.selection import select


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
    impl: str | None = None,
) -> None:
    """Make tokens that came before less likely, or more, in place. Computed in fp32.

    Args:
        logits: ``[S, V]``, fp32 or bf16.
        tokens: int32 ``[R, L]``: the token table, every entry an id of the vocabulary.
        draws: int64 ``[P]``, distinct: the rows of `logits` with penalties; `rows` int64 ``[P]``: theirs in `tokens`.
        starts, ends: int64 ``[P]``: a request's tokens are ``[0, end)``, those it generated ``[start, end)``.
        repetition: fp32 ``[P]``: of each of its tokens, a positive logit is divided by it, another multiplied
            (arXiv:1909.05858).
        frequency, presence: fp32 ``[P]``: of each token generated c times, ``c * frequency + presence`` is taken off.
        most: the largest end.
    """
    run = select("penalize", logits.device.type, impl)
    run(logits, tokens, draws, rows, starts, ends, repetition, frequency, presence, most=most)


def mask_logits(logits: Tensor, rows: Tensor, masks: Tensor, *, impl: str | None = None) -> None:
    """Set the logits of ids that a row may not draw to -inf, in place.

    Args:
        logits: ``[S, V]``, fp32 or bf16.
        rows: int64 ``[M]``, distinct: the rows of `logits` that have a mask.
        masks: uint8 ``[M, W]``: bit ``id % 8`` of byte ``id // 8`` is 1 where `id` is allowed; ids from 8 W on are not.
    """
    select("mask_logits", logits.device.type, impl)(logits, rows, masks)


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
    impl: str | None = None,
) -> Tensor:
    """Choose one token id per row of `logits` ``[B, V]``; int64 ``[B]``.

    Pass `temperature` None when every row is greedy: that is the short path, nothing else is read. Filters
    are None when no row uses them. Equal logits stand or fall together in every filter.

    Args:
        temperature: fp32 ``[B]``; 0 means greedy for that row.
        top_k: int32 ``[B]``; <= 0 means off.
        top_p: fp32 ``[B]``; >= 1 means off. Applied after `top_k` and `min_p`, to what they left.
        min_p: fp32 ``[B]``; 0 means off.
        seeds: int64 ``[B]``, any values; needed with `temperature`.
        positions: int64 ``[B]``: index of the token to be chosen in its sequence; needed with `temperature`.
            (seed, position) fully determine a row's noise, whatever else is in the batch.
    """
    if temperature is not None and (seeds is None or positions is None):
        raise ValueError("sample: seeds and positions are needed with temperature")
    result: Tensor = select("sample", logits.device.type, impl)(
        logits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=seeds,
        positions=positions,
        out=out,
    )
    return result


def logprobs(
    logits: Tensor, tokens: Tensor, top_n: int, *, impl: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities under the unfiltered softmax of `logits` ``[B, V]``.

    Returns (log-probability of ``tokens[b]`` ``[B]``, its rank ``[B]`` from 1, ids ``[B, top_n]`` and
    log-probabilities ``[B, top_n]`` of the best tokens).
    """
    result: tuple[Tensor, Tensor, Tensor, Tensor] = select("logprobs", logits.device.type, impl)(logits, tokens, top_n)
    return result
