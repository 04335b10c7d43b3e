"""The Kubernetes operator: turns one InferenceService into prefill, decode, router and Mooncake master.

Entered through ``__main__`` (the commands ``isthmus`` and ``kubectl-isthmus``) and, in a cluster,
through ``handlers``. Reading (``observe``), deciding (``plan``, ``render``, ``status``) and writing
(``apply``) are separate; the deciding part is pure. Nothing here imports torch, the runtime or the kernels:
agreement with them is data, checked by ``tests/contract``.
"""
