"""Sums over ranks by cuda/peer_sum.cu, through memory of one another that the ranks have mapped."""

import ctypes
import struct
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from isthmus_kernels import cuda_library, early_launch

MOST_RANKS = 8
EMPTY = 0xFF
"""Every byte of an inbox before the first call, and of what was read out of it."""
_MOST_ROW_BYTES = 4 * 1024 * 16
_CALL = struct.Struct("21qd8q")
_DTYPES = MappingProxyType({torch.bfloat16: 0, torch.float16: 1, torch.float32: 2})


def inbox_bytes(ranks: int, blocks: int, room: int) -> int:
    """Bytes of one rank's inbox. `blocks`: thread blocks that take part, at most; `room`: bytes that one
    takes of another rank."""
    return 2 * blocks * (ranks - 1) * room


@dataclass(frozen=True, slots=True)
class Inboxes:
    """What one rank knows of all. Blocks, room and the number of ranks are the same on each; calls too, in one order
    and on one stream of each rank."""

    rank: int
    addresses: tuple[int, ...]
    """Of every rank's inbox in this process, by rank: `inbox_bytes` each, at a multiple of 16, `EMPTY` at first."""
    blocks: int
    """At most the multiprocessors of each rank's device, since all are to run at once."""
    room: int
    calls: Tensor
    """int32 [blocks] on the device, of zero at first."""
    words: Tensor
    """Pinned int32 [2] of zero. The host sets the first to end all waiting; the kernel sets the second to 1 + the rank
    that it waited for in vain."""
    patience_s: float
    """So long a rank is waited for. Then, as when waiting is ended, the kernel traps, and the device is lost to its
    process."""

    def __post_init__(self) -> None:
        assert 2 <= len(self.addresses) <= MOST_RANKS and self.room % 16 == 0

    def rows(self, x: Tensor) -> int:
        """How many rows of x's width and dtype one call takes at most."""
        return self.blocks * (self.room // (x.shape[1] * x.element_size()))


def refusal(x: Tensor) -> str | None:
    """Why rows like those of x cannot be summed; None when they can. The same on every rank, for equal shapes."""
    if x.dtype not in _DTYPES:
        return f"{x.dtype}, not bfloat16, float16 or float32"
    row = x.shape[1] * x.element_size()
    if row % 16 or not 0 < row <= _MOST_ROW_BYTES:
        return f"rows of {row} bytes, not a multiple of 16 up to {_MOST_ROW_BYTES}"
    return None


def peer_sum(x: Tensor, inboxes: Inboxes) -> None:
    """Replace x ``[T, H]`` by the sum over all ranks, the same bits on each; for T of at most `Inboxes.rows`."""
    _launch(x, None, None, 0.0, x, inboxes)


def peer_sum_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, inboxes: Inboxes
) -> None:
    """Add the sum over all ranks to `residual`, in place and rounded once, and write its RMSNorm to `out`.

    Args:
        x: this rank's summand ``[T, H]``, T at most `Inboxes.rows`; or for 16-bit residuals fp32 ``[P, T, H]``: P
            parts, which are added in order and rounded to the residual's dtype.
        residual, weight, out: ``[T, H]``, ``[H]``, ``[T, H]``, the same on every rank; `out` may be x.
    """
    assert residual.shape == x.shape[-2:] == out.shape and weight.shape == x.shape[-1:]
    assert residual.dtype == out.dtype == weight.dtype and (x.dim() == 3 or x.dtype == residual.dtype)
    _launch(x, residual, weight, eps, out, inboxes)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    out: Tensor,
    inboxes: Inboxes,
) -> None:
    rows, width = out.shape
    if rows == 0:
        return
    lib = cuda_library.library()
    assert lib is not None, "inboxes were made without the library"
    assert refusal(out) is None, refusal(out)
    assert rows <= inboxes.rows(out), f"{rows} rows, of at most {inboxes.rows(out)}"
    for matrix in (x, out, residual):
        if matrix is not None:
            aligned = all(number % 16 == 0 for number in (matrix.data_ptr(), *_strides(matrix)))
            assert matrix.stride(-1) == 1 and aligned, "rows begin at multiples of 16 bytes"
    assert weight is None or (weight.data_ptr() % 16 == 0 and weight.is_contiguous())
    parts, (part_stride, x_row) = (x.shape[0], _strides(x)) if x.dim() == 3 else (0, (0, *_strides(x)))
    ranks = len(inboxes.addresses)
    call = _CALL.pack(
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        out.data_ptr(),
        *(rows, width),
        *(parts, part_stride),
        *(x_row, 0 if residual is None else _strides(residual)[0], _strides(out)[0]),
        *(_DTYPES[out.dtype], x.device.index),
        *(inboxes.rank, ranks, inboxes.blocks, inboxes.room),
        *(inboxes.calls.data_ptr(), inboxes.words.data_ptr()),
        int(inboxes.patience_s * 1e9),
        early_launch.allowed(x.device),
        eps,
        *inboxes.addresses,
        *(0,) * (MOST_RANKS - ranks),
    )
    stream = ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
    cuda_library.check(lib.isthmus_peer_sum(call, stream), "peer_sum: cannot launch the kernel")


def _strides(x: Tensor) -> tuple[int, ...]:
    """In bytes, all but the last."""
    return tuple(stride * x.element_size() for stride in x.stride()[:-1])
