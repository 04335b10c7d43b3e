"""The seal behind every value in the storage pool: whoever reads a value can tell by itself whether it is whole.

Pure. A value is ``payload | seal``, the seal ``magic | kind | payload length | check`` (little-endian; 32 bytes). The
check covers the value's key and its payload, so a whole value that lies under another's key is found as well. It is a
CRC-32, or, in a service with a secret, HMAC-SHA256 cut to 128 bits (RFC 2104, section 5): then nobody without the
secret can make a value that is taken for one of the service's.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import zlib

_SEAL = struct.Struct("<4sIQ16s")
_MAGIC = b"IKVB"
_CRC32, _HMAC = 1, 2
SEAL_BYTES = _SEAL.size


def seal(secret: bytes, key: str, payload: bytes | memoryview) -> bytes:
    """The SEAL_BYTES that follow `payload` under `key`. An empty `secret`: against accidents alone."""
    size = len(payload)
    if not secret:
        crc = zlib.crc32(payload, zlib.crc32(_head(key, size)))
        return _SEAL.pack(_MAGIC, _CRC32, size, crc.to_bytes(16, "little"))
    check = hmac.new(secret, _head(key, size), hashlib.sha256)
    check.update(payload)
    return _SEAL.pack(_MAGIC, _HMAC, size, check.digest()[:16])


def is_sealed(secret: bytes, key: str, payload: bytes | memoryview, found: bytes) -> bool:
    """Whether `found` is the seal of this payload under this key."""
    return hmac.compare_digest(found, seal(secret, key, payload))


def _head(key: str, size: int) -> bytes:
    name = key.encode()
    return struct.pack("<QQ", len(name), size) + name
