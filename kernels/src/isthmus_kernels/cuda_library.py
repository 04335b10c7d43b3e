"""The compiled CUDA library: found beside this file, loaded once. Plain C entry points, as in `native`.

It holds its own CUDA run-time library and machine code for the GPUs it was built for, so that nothing is compiled
where it runs. Built from `*/cuda/*.cu` where nvcc is (setup.py).
"""

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch

from isthmus_kernels import native

_LOG = logging.getLogger(__name__)
_CAPABILITY = (9, 0)
_WITHOUT = "swaps run as the slower PyTorch copies, prefill attention as the slower Triton kernel, MLPs in more steps"


@cache
def library() -> ctypes.CDLL | None:
    """Load the library; None (and one logged line) where it was not built, is stale or cannot be loaded."""
    folder = Path(__file__).parent
    path = native.find(folder, "_cuda")
    if path is None:
        _LOG.warning("CUDA kernels are not compiled: %s", _WITHOUT)
        return None
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        _LOG.warning("CUDA kernels cannot be loaded (%s): %s", error, _WITHOUT)
        return None
    lib.isthmus_cuda_sources.restype = ctypes.c_char_p
    lib.isthmus_cuda_error.restype = ctypes.c_char_p
    sources = native.source_digest(folder, native.CUDA_SOURCES)
    if sources is not None and lib.isthmus_cuda_sources().decode() != sources:
        _LOG.warning(
            "CUDA kernels were compiled from other sources (%s; install again): %s",
            path,
            _WITHOUT,
        )
        return None
    return lib


@cache
def available() -> bool:
    """Whether the library's kernels run on the CUDA devices of this process."""
    return torch.cuda.get_device_capability() >= _CAPABILITY and library() is not None


def check(code: int, doing: str) -> None:
    """Raise RuntimeError with CUDA's own words for a positive `code`."""
    if code > 0:
        lib = library()
        assert lib is not None
        raise RuntimeError(f"{doing}: CUDA error {code}: {lib.isthmus_cuda_error(ctypes.c_int64(code)).decode()}")
