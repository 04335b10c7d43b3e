"""CUDA's runtime by NVIDIA's own bindings (the package cuda-bindings), which is loaded where it is first asked for."""

from __future__ import annotations

import importlib.util
from typing import Any


def has_bindings() -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None


def runtime() -> Any:
    """Its module of the runtime's calls. Raises ImportError."""
    from cuda.bindings import runtime

    return runtime


def checked(answer: tuple[Any, ...]) -> Any:
    """What a call of CUDA gives. Raises RuntimeError with its error's name."""
    code, *rest = answer
    if code:
        raise RuntimeError(code.name)
    return rest[0] if rest else None
