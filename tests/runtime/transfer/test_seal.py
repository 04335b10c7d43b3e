"""Seals of values in the storage pool: whatever is not the payload that was put under that key is found."""

from __future__ import annotations

import hashlib
import hmac
import struct
import zlib

from hypothesis import given
from hypothesis import strategies as st

from isthmus_runtime.transfer.seal import SEAL_BYTES, is_sealed, seal

keys = st.text(max_size=40).filter(lambda text: text.isascii())
payloads = st.binary(max_size=300)
secrets = st.sampled_from([b"", b"a service's secret"])


def test_the_format_is_the_documented_one() -> None:
    head = struct.pack("<QQ", 3, 4) + b"k:1"
    crc = struct.pack("<4sIQ16s", b"IKVB", 1, 4, struct.pack("<I", zlib.crc32(head + b"data")))
    assert seal(b"", "k:1", b"data") == crc and len(crc) == SEAL_BYTES == 32
    check = hmac.new(b"secret", head + b"data", hashlib.sha256).digest()[:16]
    assert seal(b"secret", "k:1", b"data") == struct.pack("<4sIQ16s", b"IKVB", 2, 4, check)


@given(secrets, keys, payloads)
def test_what_was_put_is_taken(secret: bytes, key: str, payload: bytes) -> None:
    assert is_sealed(secret, key, memoryview(payload), seal(secret, key, payload))


@given(secrets, keys, payloads, st.data())
def test_a_flipped_bit_anywhere_is_found(secret: bytes, key: str, payload: bytes, data: st.DataObject) -> None:
    value = bytearray(payload + seal(secret, key, payload))
    bit = data.draw(st.integers(0, 8 * len(value) - 1))
    value[bit // 8] ^= 1 << bit % 8
    assert not is_sealed(secret, key, bytes(value[:-SEAL_BYTES]), bytes(value[-SEAL_BYTES:]))


@given(secrets, keys, payloads, payloads, st.data())
def test_a_torn_value_is_found(secret: bytes, key: str, old: bytes, new: bytes, data: st.DataObject) -> None:
    """The beginning of one value, the rest, its seal included, of another of the same size."""
    size = min(len(old), len(new))
    old, new = old[:size], new[:size]
    cut = data.draw(st.integers(0, size))
    torn = new[:cut] + old[cut:]
    assert is_sealed(secret, key, torn, seal(secret, key, old)) is (torn == old)


@given(secrets, st.lists(keys, min_size=2, max_size=2, unique=True), payloads)
def test_a_whole_value_under_another_key_is_found(secret: bytes, both: list[str], payload: bytes) -> None:
    key, other = both
    assert not is_sealed(secret, other, payload, seal(secret, key, payload))


@given(keys, payloads, secrets)
def test_without_the_secret_nobody_makes_a_seal(key: str, payload: bytes, secret: bytes) -> None:
    for made in (seal(b"", key, payload), seal(b"another secret", key, payload), bytes(SEAL_BYTES)):
        assert not is_sealed(b"the secret", key, payload, made)
    assert not is_sealed(secret, key, payload, b"")
