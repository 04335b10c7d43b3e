"""Sizes and durations as people write them."""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_QUANTITY = re.compile(r"^(\d+(?:\.\d+)?)(k|M|G|T|Ki|Mi|Gi|Ti)?$")
_DURATION = re.compile(r"^(\d+(?:\.\d+)?)(ms|s|m|h)?$")
_MAX_BYTES = 2**63
_SECONDS = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}


def parse_quantity(text: str) -> int:
    """Kubernetes quantity (`512Mi`, `1G`, `1024`) to bytes. ValueError names the accepted suffixes."""
    match = _QUANTITY.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write a number with one of k M G T Ki Mi Gi Ti, for example 512Mi")
    size = Decimal(match[1]) * _UNITS[match[2] or ""]
    if size >= _MAX_BYTES:
        raise ValueError(f"{text!r} is more than 64-bit addresses can reach; write less than 8Ei")
    return int(size)


def parse_duration(text: str) -> float:
    """`30s`, `5m`, `250ms`, `1h` or plain seconds, to seconds."""
    match = _DURATION.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write a number with one of ms s m h, for example 30s")
    return float(match[1]) * _SECONDS[match[2] or ""]
