"""Puts a downloaded model in place: whole or not at all, once for all pods that share a folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..errors import WeightsError
from .config import read_model_spec

TOKENIZER_FILES = ("*.json", "tokenizer.model", "*.jinja", "merges.txt", "vocab.txt", "LICENSE*")
"""What a router needs. Nothing that can run code: no pickles, no Python files."""

MODEL_FILES = ("*.safetensors", *TOKENIZER_FILES)

Progress = Callable[[str], None]


def in_place(out: Path, progress: Progress, download: Callable[[Path], None], *, weights: bool) -> None:
    """Fill a folder beside `out` by `download`, check it, and rename it to `out`.

    An `out` that is there is taken as it is: it was put there whole, by an earlier start or by another pod of the same
    cache, perhaps while this one was downloading. Raises WeightsError when what was downloaded is no model of a
    supported kind, or `out` is something else.
    """
    if _complete(out, weights=weights):
        progress(f"{out} is there already")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        partial.chmod(0o755)
        download(partial)
        read_model_spec(partial)
        if weights and not any(partial.glob("*.safetensors")):
            raise WeightsError(f"{out.name}: the source has no safetensors weights")
        try:
            partial.rename(out)
        except OSError:
            # The other pod was faster; both have the same files.
            if not _complete(out, weights=weights):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    progress(f"wrote {out}")


def _complete(out: Path, *, weights: bool) -> bool:
    if not out.exists():
        return False
    if not out.is_dir() or not any(out.iterdir()):
        return False
    if not (out / "config.json").is_file() or (weights and not any(out.glob("*.safetensors"))):
        raise WeightsError(f"{out} exists and holds no whole model; remove it or name another folder")
    return True
