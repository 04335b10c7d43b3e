"""The counter-based noise of `noise.py` inside a kernel: the same bits, and the same fp32 up to the logarithm."""

import triton
import triton.language as tl


@triton.jit
def mix64(x):
    """The splitmix64 finaliser on uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def noise_key(seed, position):
    """What a row's noise starts from, uint64, of int64 `seed` and `position`."""
    return mix64(seed.to(tl.uint64, bitcast=True) + (position + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15)


@triton.jit
def uniform(key, token):
    """The number in (0, 1) of int32 `token`."""
    bits = mix64(key + (token + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    return ((bits >> 41).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def gumbel(u):
    """Standard Gumbel noise from a uniform number."""
    return -tl.log(-tl.log(u))
