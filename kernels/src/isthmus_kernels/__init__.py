"""Kernels of the Isthmus engine: attention over paged KV, norms, linear, sampling.

Called only by `isthmus_runtime.layers` and `isthmus_runtime.executor`, through
`isthmus_kernels.dispatch` and the two modules beside it, which pick the implementation for a device.
Each op folder holds `reference.py` (plain PyTorch, the definition), faster
implementations with the same signature, and a README with the maths.
Does not belong here: model structure, scheduling, KV ownership.
"""
