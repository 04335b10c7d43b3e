"""The record that prefill writes last: its bytes, its digest over keys, and what decode checks before it runs.

Pure. On the wire a record is ``magic | payload length | CRC-32 of the payload`` (little-endian u32 each), then JSON.
The frame tells a complete record from the remains of an earlier one in the same place.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass

from pydantic import ValidationError

from ..kv.keys import keys_digest
from ..protocol.ticket import PrefillRecord

_HEADER = struct.Struct("<4sII")
_MAGIC = b"IKVR"
HEADER_BYTES = _HEADER.size


def pack_record(record: PrefillRecord) -> bytes:
    """Frame a record for the wire."""
    payload = record.model_dump_json().encode()
    return _HEADER.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload


def unpack_record(raw: bytes) -> PrefillRecord:
    """Inverse of `pack_record`; bytes after the frame are ignored.

    Raises:
        ValueError: no record is there, or it is cut short or damaged.
    """
    if len(raw) < HEADER_BYTES:
        raise ValueError(f"record of {len(raw)} bytes is shorter than its header of {HEADER_BYTES}")
    magic, length, crc = _HEADER.unpack_from(raw)
    if magic != _MAGIC:
        raise ValueError("no record was written")
    payload = bytes(raw[HEADER_BYTES : HEADER_BYTES + length])
    if len(payload) != length:
        raise ValueError(f"record is cut short: {len(payload)} of {length} bytes")
    if zlib.crc32(payload) != crc:
        raise ValueError("record is damaged: its CRC-32 differs")
    try:
        return PrefillRecord.model_validate_json(payload)
    except ValidationError as error:
        raise ValueError(f"record has a wrong field: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a record must say for decode to accept the blocks it reserved."""

    attempt: str
    num_tokens: int
    keys: tuple[str, ...]
    block_bytes: int
    vocab_size: int = 0
    """Ids of the model; another one would break the executor for every request. 0: unknown."""


def mismatch(record: PrefillRecord, expected: Expected) -> str:
    """First difference, naming both values; empty when the record is the one expected."""
    pairs = (
        ("attempt", record.attempt, expected.attempt),
        ("token count", record.num_tokens, expected.num_tokens),
        ("block bytes", record.block_bytes, expected.block_bytes),
        ("key digest", record.key_digest, keys_digest(expected.keys)),
    )
    for name, got, want in pairs:
        if got != want:
            return f"record has {name} {got}, decode expects {want}"
    token, logprob, top = record.first_logprobs or (record.first_token, 0.0, ())
    for given in (record.first_token, token, *(other for other, _ in top)):
        if expected.vocab_size and not 0 <= given < expected.vocab_size:
            return f"record has token id {given}, the model has ids 0 to {expected.vocab_size - 1}"
    for value in (logprob, *(other for _, other in top)):
        if math.isnan(value) or value == math.inf:
            return f"record has log-probability {value}, which is none"
    return ""
