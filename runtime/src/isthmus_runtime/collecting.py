"""Python's collector of cycles in a process that serves: it stops all threads while it looks."""

from __future__ import annotations

import gc

THRESHOLD = 20_000
"""Containers made, less those freed, between two collections; 700 by default."""


def spare_collector() -> None:
    """Call it when all that stays is there, before the first request.

    What is there now is never looked at again: of an engine's modules, weights and graphs that would take a tenth of a
    second, in which no token is told and no step is launched. A request leaves hardly a cycle behind, so the collector
    need not look that often either.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD)
