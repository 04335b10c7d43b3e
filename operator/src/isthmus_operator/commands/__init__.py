"""The commands of ``isthmus``: their flags (``parser``), shell completion, and what asks or runs in a cluster.

Called only by ``__main__``.
"""
