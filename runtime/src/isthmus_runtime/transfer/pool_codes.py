"""Mooncake's storage codes, in words."""

from __future__ import annotations

NO_SPACE, MISSING, OWNER_GONE = -200, -704, -800
NOT_AS_PUT = (-10, -600, OWNER_GONE)
"""Of a read: the value has another size than was put, or cannot be had any more."""
UNREACHABLE = (-900, -901, -1010)
_MEANING = {
    -10: "buffer too small",
    -200: "the pool has no space",
    -600: "invalid size",
    -704: "not in the pool",
    -706: "leased by a reader",
    -707: "lease ended during the read",
    -800: "the pod that held it is gone",
    -900: "mooncake_master does not answer",
    -901: "mooncake_master did not answer in time",
    -1010: "mooncake_master is unavailable",
}


def explain(code: int) -> str:
    """A Mooncake code in words."""
    return f"{_MEANING.get(code, 'failed')} ({code})"
