"""Definition of the product with low-rank adapters."""

from torch import Tensor


def lora(x: Tensor, out: Tensor, slots: Tensor, a: Tensor, b: Tensor, starts: tuple[int, ...]) -> None:
    """See `dispatch.lora`."""
    stops = (*starts[1:], out.shape[1])
    for row, slot in enumerate(slots.tolist()):
        if slot:
            for part, (start, stop) in enumerate(zip(starts, stops, strict=True)):
                inner = a[slot - 1, part].float() @ x[row].float()
                added = inner @ b[slot - 1, :, start:stop].float()
                out[row, start:stop] = (out[row, start:stop].float() + added).to(out.dtype)
