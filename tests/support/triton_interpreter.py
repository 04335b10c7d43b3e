"""Run Triton kernels on the CPU, in Triton's interpreter. Call `enable` before a module with kernels is imported.

What Triton 3.6's interpreter does unlike a device is put right here: it truncates to bf16 and E4M3 instead of rounding,
multiplies matrices of bf16 as if their bits were integers, takes arrays of one element for loop bounds, which numpy
from 2.4 on refuses, and warns of divisions whose results a mask throws away.
"""

import inspect
import os
from functools import cache
from typing import Any

import numpy as np
import torch


def _widen(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _round(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _round_e4m3(values: np.ndarray) -> np.ndarray:
    wide = torch.from_numpy(np.ascontiguousarray(values)).clamp(-448, 448)
    return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


@cache
def enable() -> bool:
    """Make Triton interpret every kernel of this process; False where Triton is not installed."""
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return False
    builder = interpreter.InterpreterBuilder
    cast, dot, convert = builder.cast_impl, builder.create_dot, builder.create_fp_to_fp
    patch_tensor = interpreter._patch_lang_tensor

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        pair = source.dtype.scalar, target.scalar
        if pair == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(_widen(source.data), tl.float32)
        if pair == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(_round(source.data), tl.bfloat16)
        return cast(self, source, target)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source.dtype.scalar, target.scalar) == (tl.float32, tl.float8e4nv):
            return interpreter.TensorHandle(_round_e4m3(source.data), tl.float8e4nv)
        return convert(self, source, target, rounding)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        wide = [cast_impl(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return dot(self, *wide, *rest)

    @cache
    def built_in(package: Any) -> tuple[str, ...]:
        return tuple(name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member))

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in built_in(package):
            if tl.core.is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    call = interpreter.GridExecutor.__call__

    def quiet(self: Any, *args: Any, **kwargs: Any) -> None:
        with np.errstate(all="ignore"):
            call(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = quiet
    # Copies every argument's whole storage back, onto itself for CPU tensors: gigabytes where a test reserves them.
    interpreter.GridExecutor._restore_args_dev = lambda *arguments: None
    builder.cast_impl, builder.create_dot, builder.create_fp_to_fp = cast_impl, create_dot, create_fp_to_fp
    interpreter._patch_lang_tensor = patched
    # Looks at all that a module has for each launch of a kernel.
    interpreter._patch_builtin = patch_builtin
    return True
