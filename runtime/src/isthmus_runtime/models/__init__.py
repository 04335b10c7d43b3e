"""Model families, one file each: how its configuration is read, which tensors it has, how it is put together.

Called by ``executor`` and ``checkpoints`` through ``registry``. A model knows its own architecture and weight names; it
takes batch metadata as a forward argument and holds no request state. No kernels directly, no scheduling, no I/O but
reading a configuration. What is imported at the top of a family's file is torch-free: a router, `kv-plan` and the
simulator read configurations, too.
"""
