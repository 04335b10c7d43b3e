"""Low-rank adapters on CPU through the compiled library (cpu/lora.cpp)."""

from torch import Tensor

from isthmus_kernels import native


def lora(x: Tensor, out: Tensor, slots: Tensor, a: Tensor, b: Tensor, starts: tuple[int, ...]) -> None:
    """Same contract as `reference.lora`."""
    bounds = (*starts, *(out.shape[1],) * (4 - len(starts)))
    native.entry("lora", "17q")(
        (out, x, slots, a, b),
        out.data_ptr(),
        x.data_ptr(),
        slots.data_ptr(),
        a.data_ptr(),
        b.data_ptr(),
        x.shape[0],
        x.shape[1],
        out.shape[1],
        a.shape[2],
        x.stride(0),
        out.stride(0),
        len(starts),
        *bounds,
        native.dtype_code(x.dtype, "x"),
    )
