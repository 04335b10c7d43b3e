"""A name for a set of weights that changes when the weights do."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from ..errors import WeightsError

_SAMPLES = 64
_SAMPLE_BYTES = 4096


def weights_revision(directory: str) -> str:
    """Digest (32 hex digits) over config.json and, per safetensors file, its name, size and samples of its bytes.

    Two engines share KV only when this agrees, so it must differ between fine-tunes of one architecture. Sampling
    (64 pieces of 4 KiB a file, the header among them) keeps a start from reading every byte of a large model twice.
    """
    root = Path(directory)
    files = sorted(root.glob("*.safetensors"))
    config = root / "config.json"
    if not files or not config.is_file():
        raise WeightsError(f"{directory} has no config.json with *.safetensors beside it; import or fetch a model")
    digest = sha256(config.read_bytes())
    for file in files:
        size = file.stat().st_size
        digest.update(f"\0{file.name}\0{size}\0".encode())
        with file.open("rb") as handle:
            for number in range(_SAMPLES):
                handle.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
                digest.update(handle.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
