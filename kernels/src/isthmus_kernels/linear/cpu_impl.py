"""Linear on CPU through the compiled panel product (cpu/linear.cpp)."""

import mmap
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isthmus_kernels import native

_LARGE_PAGE = 2 << 20


@dataclass(frozen=True, slots=True)
class PanelWeight:
    """A weight cut into panels of output channels, each stored along K (see the README)."""

    panels: Tensor
    bias: Tensor | None
    rows: int
    columns: int
    paired: bool
    """Neighbouring columns share a word: bf16 rows are multiplied by AVX512-BF16."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.panels.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def apply(self, x: Tensor, out: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias``."""
        if x.dim() != 2 or x.shape[1] != self.columns or x.stride(1) != 1:
            raise ValueError(f"x: expected [T, {self.columns}] with contiguous rows, got {tuple(x.shape)}")
        tokens = x.shape[0]
        if out is None:
            out = torch.empty((tokens, self.rows), dtype=x.dtype)
        elif out.shape != (tokens, self.rows) or out.dtype != x.dtype or out.stride(1) != 1:
            raise ValueError(f"out: expected {x.dtype} [{tokens}, {self.rows}], got {out.dtype} {tuple(out.shape)}")
        kept = (out, x, self.panels, self.bias)
        shape = (
            out.data_ptr(),
            x.data_ptr(),
            self.panels.data_ptr(),
            0 if self.bias is None else self.bias.data_ptr(),
            tokens,
            self.rows,
            self.columns,
            x.stride(0),
            out.stride(0),
        )
        if self.paired:
            if x.dtype != torch.bfloat16:
                raise ValueError(f"x: the weight was packed for bfloat16, got {x.dtype}")
            native.entry("linear_pairs", "9q")(kept, *shape)
        else:
            codes = native.dtype_code(x.dtype, "x"), native.dtype_code(self.panels.dtype, "weight")
            native.entry("linear", "11q")(kept, *shape, *codes)
        return out

    def outputs_from(self, first: int) -> "PanelWeight | None":
        """The outputs from `first` on, in the same memory; None where a panel does not begin there."""
        if first % _panel_width():
            return None
        depth = self.columns + self.columns % 2 if self.paired else self.columns
        bias = None if self.bias is None else self.bias[first:]
        return replace(self, panels=self.panels[first * depth :], bias=bias, rows=self.rows - first)


def _panel_width() -> int:
    return native.entry("linear_panel_width", "").query()


def _on_large_pages(count: int, dtype: torch.dtype) -> Tensor:
    """`count` uninitialised elements, on pages of 2 MiB where the system has them.

    A product with one row reads its weight once: with pages of 4 KiB the processor's prefetch stops at each, and the
    addresses of a model's pages do not fit its tables.
    """
    size = count * dtype.itemsize
    if size < _LARGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(count, dtype=dtype)
    # Room to begin at a page's multiple; what is never touched costs addresses alone.
    memory = mmap.mmap(-1, size + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without them says so: plain pages then.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    room = torch.frombuffer(memory, dtype=torch.uint8)
    first = -room.data_ptr() % _LARGE_PAGE
    return room[first : first + size].view(dtype)


def pack(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> PanelWeight:
    """Cut `weight` into panels for activations of `dtype`."""
    native.dtype_code(dtype, "dtype")
    code = native.dtype_code(weight.dtype, "weight")
    rows, columns = weight.shape
    width = _panel_width()
    padded = -(-rows // width) * width
    source = weight.contiguous()
    bias = None if bias is None else bias.float().contiguous()
    paired = weight.dtype == dtype == torch.bfloat16 and native.prefers_pairs()
    panels = _on_large_pages(padded * (columns + columns % 2 if paired else columns), weight.dtype)
    kept, addresses = (panels, source), (panels.data_ptr(), source.data_ptr())
    if paired:
        native.entry("linear_pairs_pack", "4q")(kept, *addresses, rows, columns)
    else:
        native.entry("linear_pack", "5q")(kept, *addresses, rows, columns, code)
    return PanelWeight(panels, bias, rows, columns, paired)
