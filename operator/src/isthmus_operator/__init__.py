"""The Kubernetes operator: turns one InferenceService into prefill, decode, router and Mooncake master.

Entered through ``__main__`` (the commands ``isthmus`` and ``kubectl-isthmus``). Each package imports only those before
it: ``api`` (the resource), ``render`` (manifests), ``plan`` (decisions; these three are pure), then ``shell`` (the
cluster) and, beside it, ``local`` (``isthmus up``). Nothing here imports torch, the runtime or the kernels: agreement
with them is data, checked by ``tests/contract``.
"""
