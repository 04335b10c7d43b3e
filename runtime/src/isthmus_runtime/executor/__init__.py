"""Runs one scheduled step on a device: inputs, model forward, sampling, and the KV tensors.

Implements ``interfaces.steps.Executor``; built by ``commands``. The only package besides ``layers`` that uses the
kernels, and the only creator of KV tensors (``kv_cache``). ``fake`` is the torch-free executor for tests and
simulation. No scheduling, no admission, no HTTP here.
"""
