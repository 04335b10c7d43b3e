"""Model families, one file each: the forward pass written out of ``layers``.

Called by ``executor``. A model knows its own architecture and weight names; it takes batch metadata as a
forward argument and holds no request state. No kernels directly, no scheduling, no I/O.
"""
