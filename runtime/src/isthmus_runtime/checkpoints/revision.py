"""A name for a set of weights that changes when the weights do."""

from __future__ import annotations

import json
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from ..errors import WeightsError
from .names import INDEX
from .provenance import recorded_digests

_WHOLE_BYTES = 32 << 10
"""A tensor of no more is read whole: norms and biases."""
_PIECES = 4
_PIECE_BYTES = 4096
_MAX_HEADER_BYTES = 16 << 20
"""As where they are loaded."""
_AT_ONCE = 8
"""Files. Those of the largest models have 100,000 tensors together."""


def weights_revision(directory: str) -> str:
    """Digest (32 hex digits) over config.json, the index that says which file each tensor is read from, and, per
    safetensors file, its name, size, header and of each tensor a sample: all of a small one, otherwise four pieces of
    4 KiB, its ends among them; and where the folder has a record of what was downloaded or imported, the SHA-256 that
    it has of the weights.

    Two engines share KV only when this agrees, so it must differ between fine-tunes of one architecture, also where
    they change a part of the tensors. Sampling keeps a start from reading every byte of a large model twice; a change
    of a few values of a large tensor is seen by a record alone.
    """
    root = Path(directory)
    files = sorted(root.glob("*.safetensors"))
    config = root / "config.json"
    if not files or not config.is_file():
        raise WeightsError(f"{directory} has no config.json with *.safetensors beside it; import or fetch a model")
    digest = sha256(config.read_bytes())
    if (index := root / INDEX).is_file():
        digest.update(sha256(index.read_bytes()).digest())
    recorded = recorded_digests(root)
    with ThreadPoolExecutor(_AT_ONCE, "revision") as pool:
        for file, sample in zip(files, pool.map(_sample, files), strict=True):
            known = recorded.get(file.name, "")
            digest.update(f"\0{file.name}\0{file.stat().st_size}\0{known}\0".encode() + sample)
    return digest.hexdigest()[:32]


def _sample(file: Path) -> bytes:
    """Digest of the header, and of a sample of each tensor. WeightsError for a file that has none."""
    with file.open("rb") as opened:
        try:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes; at most {_MAX_HEADER_BYTES}")
            header = opened.read(length)
            offsets = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
            places = sorted((int(begin), int(end)) for begin, end in offsets)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError, struct.error) as error:
            raise WeightsError(f"{file} has no header of safetensors: {error}") from error
        digest = sha256(header)
        for begin, end in places:
            first = 8 + length + begin
            if end - begin <= _WHOLE_BYTES:
                digest.update(os.pread(opened.fileno(), end - begin, first))
                continue
            for number in range(_PIECES):
                at = (end - begin - _PIECE_BYTES) * number // (_PIECES - 1)
                digest.update(os.pread(opened.fileno(), _PIECE_BYTES, first + at))
    return digest.digest()
