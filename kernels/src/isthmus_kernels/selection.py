"""Which implementation of an op runs on a device. The choice per (op, device) is logged once."""

import importlib
import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from isthmus_kernels import cuda_library, native
from isthmus_kernels.device import interpreted

_LOG = logging.getLogger(__name__)

# Per op: its folder, and the implementations that exist, best first.
_OPS = MappingProxyType(
    {
        "paged_attention": ("paged_attention", ("cpu", "cuda", "triton", "torch", "reference", "flashinfer")),
        "rope_kv_write": ("rope_kv_write", ("cpu", "triton", "reference")),
        "latent_kv_write": ("latent_kv_write", ("reference",)),
        "rms_norm": ("rms_norm", ("cpu", "triton", "reference")),
        "add_rms_norm": ("rms_norm", ("cpu", "triton", "reference")),
        "silu_mul": ("silu_mul", ("cpu", "triton", "reference")),
        "gelu_tanh_mul": ("silu_mul", ("cpu", "triton", "reference")),
        "embedding": ("embedding", ("cpu", "triton", "reference")),
        "moe_route": ("moe", ("cpu", "triton", "reference")),
        "moe": ("moe", ("cpu", "triton", "reference")),
        "pack": ("linear", ("cpu", "cuda", "triton", "torch")),
        "pack_fp8": ("fp8_linear", ("triton", "reference")),
        "quantize": ("fp8_linear", ("triton", "reference")),
        "lora": ("lora", ("cpu", "triton", "reference")),
        "block_copy": ("block_copy", ("triton", "torch", "reference")),
        "kv_swap": ("kv_swap", ("cuda", "cpu", "reference")),
        "penalize": ("penalties", ("torch", "reference")),
        "mask_logits": ("mask_logits", ("cpu", "torch", "reference")),
        "sample": ("sampling", ("cpu", "triton", "torch", "reference")),
        "logprobs": ("sampling", ("triton", "reference")),
    }
)


def usable(impl: str, device: str, asked: str | None) -> bool:
    """Whether the implementation `impl` runs on `device` here; `asked`: the one that the caller named."""
    if impl == "cpu":
        return device == "cpu" and native.available()
    if impl == "triton":
        # The interpreter is for tests: it runs when it is asked for, and is never chosen.
        return device == "cuda" or (asked == "triton" and interpreted())
    if impl == "flashinfer":
        # Nobody's dependency, and never chosen: whoever asks for it compares.
        return device == "cuda" and asked == "flashinfer" and find_spec("flashinfer") is not None
    if impl == "cuda":
        return device == "cuda" and cuda_library.available()
    return True


@cache
def select(op: str, device: str, impl: str | None) -> Callable[..., Any]:
    """The function of `op` for tensors on `device`: of `impl`, or the best. Raises ValueError where that cannot run."""
    folder, known = _OPS[op]
    names = [name for name in known if usable(name, device, impl)]
    if impl is not None and impl not in names:
        raise ValueError(f"impl: {impl!r} cannot run {op} on {device}; usable here: {', '.join(names)}")
    chosen = impl or names[0]
    _LOG.info("%s on %s: %s", op, device, f"cpu ({native.level()})" if chosen == "cpu" else chosen)
    module = chosen if chosen == "reference" else f"{chosen}_impl"
    found: Callable[..., Any] = getattr(importlib.import_module(f"isthmus_kernels.{folder}.{module}"), op)
    return found
