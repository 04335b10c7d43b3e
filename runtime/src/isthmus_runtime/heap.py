"""The heap of this process: what glibc keeps of what was freed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def give_back() -> None:
    """Free memory of the heap back to the kernel, which glibc does by itself only from its end. Takes 0.2 ms a
    megabyte, without the interpreter's lock."""
    if _trim is not None:
        _trim(0)


def map_large_blocks() -> None:
    """From now on allocate what is large as a mapping of its own, which is gone when it is freed.

    By itself glibc takes blocks of up to 32 MiB from its heaps once some were freed, and keeps as much as 64 MiB at the
    end of each: one for each thread, of which `give_back` gives back nothing. For processes that compute no model,
    whose tensors would be mapped anew in each step.
    """
    if _settings is not None:
        _settings(_M_MMAP_THRESHOLD, _LARGE_BLOCK)
        _settings(_M_TRIM_THRESHOLD, 2 * _LARGE_BLOCK)


def share_heaps() -> None:
    """From now on all threads have two heaps together, for processes that compute a model as well: what each of its
    own would keep at its end is there for all. To be called before there are threads."""
    if _settings is not None:
        _settings(_M_ARENA_MAX, 2)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Of mallopt(3)."""
_LARGE_BLOCK = 1 << 20


def _find_settings() -> Callable[[int, int], int] | None:
    try:
        return ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return None


_settings = _find_settings()


def _find_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None  # another C library, which has no such call


_trim = _find_trim()
