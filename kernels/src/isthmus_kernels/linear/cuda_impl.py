"""Linear on Hopper: the gated product of many rows by cuda/gated.cuh, the rest as in `triton_impl`."""

import ctypes
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus_kernels import batch_invariance, cuda_library
from isthmus_kernels.device import multiprocessors
from isthmus_kernels.linear import triton_impl
from isthmus_kernels.linear.triton_impl import SkinnyWeight

# As the kernel has them (gated_layout.h): rows of x and columns of the result of a tile. Two multiprocessors take one.
# The wider tile moves less for a product.
_ROWS = 256
_WIDTHS = (128, 96)
_COLUMNS = 64
_CALL = struct.Struct("12q")
# Measured on an H200 (runtime/bench/LOG.md): below this share of useful work cuBLAS and the activation are faster.
LEAST_USE = 0.94


def refusal(x: Tensor, weight: Tensor, out: Tensor) -> str | None:
    """Why the kernel cannot take these row-major matrices; None when it can."""
    if {x.dtype, weight.dtype, out.dtype} != {torch.bfloat16}:
        return f"{x.dtype} by {weight.dtype} to {out.dtype}, not bfloat16"
    if x.shape[1] == 0 or x.shape[1] % _COLUMNS:
        return f"{x.shape[1]} columns, not a multiple of {_COLUMNS}"
    if torch.cuda.get_device_capability(x.device) != (9, 0):
        return "a device that is not of compute capability 9.0"
    # The copy engine reads and writes from multiples of 16 bytes.
    if any(matrix.stride(1) != 1 or matrix.stride(0) % 8 for matrix in (x, weight, out)):
        return "rows that do not begin at multiples of 16 bytes"
    if any(matrix.data_ptr() % 16 for matrix in (x, weight, out)):
        return "memory that does not begin at a multiple of 16 bytes"
    return None


def use(rows: int, width: int, tile: int, processors: int) -> float:
    """Share of the work of tiles of `tile` columns that is of use: edges stick out, the last tiles leave some idle."""
    tiles = -(-rows // _ROWS) * -(-width // tile)
    at_once = processors // 2
    return rows * width / (-(-tiles // at_once) * at_once * _ROWS * tile) if tiles else 0.0


def useful_tile(rows: int, width: int, processors: int) -> int | None:
    """Columns of the widest tile whose work is of use; None where two ops are faster."""
    return next((tile for tile in _WIDTHS if use(rows, width, tile, processors) >= LEAST_USE), None)


def gated_product(x: Tensor, weight: Tensor, out: Tensor, tile: int = _WIDTHS[0]) -> None:
    """Write ``silu(x @ G.T) * (x @ U.T)`` to `out` ``[T, I]``; the rows of `weight` ``[2 I, K]`` are G's, then U's.

    `tile`: columns of the result that are computed at once, 128 or 96. A row's bits depend on that row and the weight
    alone, not on the number of rows or the tile.
    """
    assert weight.shape == (2 * out.shape[1], x.shape[1]) and out.shape[0] == x.shape[0]
    lib = cuda_library.library()
    assert lib is not None, "dispatch chose this implementation without the library"
    call = _CALL.pack(
        *(matrix.data_ptr() for matrix in (out, x, weight)),
        *(x.shape[0], out.shape[1], x.shape[1]),
        *(matrix.stride(0) for matrix in (out, x, weight)),
        *(x.device.index, multiprocessors(x.device), tile),
    )
    stream = ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
    cuda_library.check(lib.isthmus_gated_product(call, stream), "linear_silu_mul: cannot launch the kernel")


@dataclass(frozen=True, slots=True)
class TiledWeight:
    """A row-major weight that goes to the kernel above for gated products of many rows."""

    skinny: SkinnyWeight

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.skinny.nbytes

    def apply(self, x: Tensor, out: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias``."""
        return self.skinny.apply(x, out)

    def apply_silu_mul(self, x: Tensor, out: Tensor) -> bool:
        """Write ``silu(g) * u`` of the halves g, u of ``x @ weight.T`` to `out`; False where two ops do it faster."""
        weight, bias = self.skinny.plain.weight, self.skinny.plain.bias
        if batch_invariance.required(x.device):
            return False  # it does not round between product and activation, and is for many rows alone
        tile = useful_tile(out.shape[0], out.shape[1], multiprocessors(x.device))
        if bias is not None or tile is None or refusal(x, weight, out) is not None:
            return False
        gated_product(x, weight, out, tile)
        return True

    def apply_add_rms_norm(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float, out: Tensor) -> bool:
        """See `SkinnyWeight`."""
        return self.skinny.apply_add_rms_norm(x, residual, norm, eps, out)

    def apply_parts(self, x: Tensor) -> Tensor | None:
        """See `SkinnyWeight`."""
        return self.skinny.apply_parts(x)

    def outputs_from(self, first: int) -> "TiledWeight":
        """The outputs from `first` on, in the same memory."""
        return TiledWeight(self.skinny.outputs_from(first))


def pack(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> TiledWeight:
    """Convert to the dtype of the activations, once."""
    return TiledWeight(triton_impl.pack(weight, bias, dtype))
