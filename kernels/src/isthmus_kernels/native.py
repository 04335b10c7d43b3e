"""The compiled CPU library: found beside this file, loaded once, instruction set chosen at run time.

Entry points are plain C functions called through ctypes, which releases the GIL for the call.
Each is compiled once per instruction set with a suffix (`_base`, `_avx2`, `_avx512`).
"""

import ctypes
import importlib.machinery
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

# torch must come first: its libgomp.so.1 is then the one that the library binds to, so both share one
# thread pool. Two pools on the same cores would spin against each other.
import torch

_LOG = logging.getLogger(__name__)
_LEVELS = ("base", "avx2", "avx512")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
DTYPES = frozenset(_DTYPES)


def dtype_code(dtype: torch.dtype, name: str) -> int:
    """Return the library's number for `dtype`; ValueError naming the argument when it has none."""
    code = _DTYPES.get(dtype)
    if code is None:
        raise ValueError(f"{name}: dtype {dtype} is not supported on CPU (float32 and bfloat16 are)")
    return code


@cache
def library() -> ctypes.CDLL | None:
    """Load the compiled library; None (and one logged line) where it was not built or cannot run here."""
    folder = Path(__file__).parent
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"_cpu{suffix}"
        if path.exists():
            break
    else:
        _LOG.warning("CPU kernels are not compiled: the slower PyTorch implementations are used")
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        _LOG.warning("CPU kernels cannot be loaded (%s): the slower PyTorch implementations are used", error)
        return None


@cache
def level() -> str | None:
    """Name of the instruction set in use (base, avx2, avx512), or None without the library."""
    lib = library()
    return None if lib is None else _LEVELS[int(lib.isthmus_cpu_level())]


def available() -> bool:
    """Whether the compiled library can be used in this process."""
    return library() is not None


@cache
def function(name: str, signature: str, at_level: str | None = None) -> Callable[..., int]:
    """Bind entry point `name`.

    `signature` has one letter per argument: p pointer, l int64, i int32, f float, d double.
    Every entry point returns an int64: 0 for success, else a code that its caller explains.
    """
    lib = library()
    assert lib is not None, "ask available() first"
    types: dict[str, type[ctypes._SimpleCData[Any]]] = {
        "p": ctypes.c_void_p,
        "l": ctypes.c_int64,
        "i": ctypes.c_int32,
        "f": ctypes.c_float,
        "d": ctypes.c_double,
    }
    bound = lib[f"isthmus_{name}_{at_level or level()}"]
    bound.argtypes = [types[letter] for letter in signature]
    bound.restype = ctypes.c_int64
    return bound
