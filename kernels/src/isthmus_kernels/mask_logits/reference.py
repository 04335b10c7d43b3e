"""Definition of masks over logits."""

from torch import Tensor


def mask_logits(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Set ``logits[rows[i], id]`` to -inf unless bit ``id % 8`` of ``masks[i, id // 8]`` is 1, in place.

    Ids beyond the last byte are not allowed either.
    """
    for row, mask in zip(rows.tolist(), masks.tolist(), strict=True):
        for token in range(logits.shape[1]):
            if token // 8 >= len(mask) or not mask[token // 8] >> token % 8 & 1:
                logits[row, token] = float("-inf")
