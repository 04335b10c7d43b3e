"""Puts a downloaded model in place: whole or not at all, once for all pods that share a folder."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from ..errors import WeightsError
from ..models.registry import read_model_spec
from .provenance import Origin, check_origin, verify_files

TOKENIZER_FILES = ("*.json", "tokenizer.model", "*.jinja", "merges.txt", "vocab.txt", "LICENSE*")
"""What a router needs. Nothing that can run code: no pickles, no Python files."""

MODEL_FILES = ("*.safetensors", *TOKENIZER_FILES)

ABANDONED_S = 24 * 3600.0
"""An unfinished download in which nothing was written for this long belongs to a pod that has gone."""

IDLE_S = 900.0
"""The same where there is no space left: longer than the pauses between the tries of a pod that starts over."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

Progress = Callable[[str], None]


def in_place(
    out: Path,
    origin: Origin,
    progress: Progress,
    download: Callable[[Path], None],
    *,
    weights: bool,
    resume_as: str = "",
) -> None:
    """Fill a folder beside `out` by `download`, check it, and rename it to `out`.

    An `out` that is there is taken as it is, unless its record names another `origin`: it was put there whole, by an
    earlier start or by another pod of the same cache, perhaps while this one was downloading. `resume_as`: a name that
    no other downloader of this cache has; what was downloaded when it fails or is killed is then kept, and given to
    `download` again by the next call with that name and origin. Raises WeightsError when the download is not a model of
    a supported kind, `out` is something else, or nothing can be written beside it.
    """
    if _complete(out, origin, weights=weights):
        progress(f"{out} is there already")
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(out, progress)
        partial = _partial(out, origin, progress, resume_as)
    except OSError as error:
        if no_space(error):
            raise
        raise WeightsError(
            f"{error.filename or out.parent}: {error.strerror}; user {os.geteuid()}, group {os.getegid()} must be able "
            f"to write to {out.parent}: give the folder to one of them, or name another"
        ) from error
    keep = bool(resume_as)
    try:
        _download(out, partial, progress, download)
        # From here on it is whole or wrong: to go on with it would help nobody.
        keep = False
        read_model_spec(partial)
        if weights and not any(partial.glob("*.safetensors")):
            raise WeightsError(f"{out.name}: the source has no safetensors weights; name a model that has them")
        try:
            partial.rename(out)
        except OSError:
            # The other pod was faster; both have the same files.
            if not _complete(out, origin, weights=weights):
                raise
    finally:
        if not keep:
            shutil.rmtree(partial, ignore_errors=True)
    progress(f"wrote {out}")


def no_space(error: BaseException | None) -> bool:
    """Whether a full disk is the reason of `error`, or of what it was raised from."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            return True
        error = error.__cause__ or error.__context__
    return False


def _download(out: Path, partial: Path, progress: Progress, download: Callable[[Path], None]) -> None:
    """Once more when that makes room: what other pods left behind is in the way of who is here. WeightsError: there is
    none."""
    try:
        download(partial)
    except Exception as error:
        if not no_space(error):
            raise
        if _remove_abandoned(out, progress, IDLE_S, keep=partial):
            _download(out, partial, progress, download)
            return
        usage = shutil.disk_usage(out.parent)
        raise WeightsError(
            f"{out.parent}: no space is left for {out.name} ({usage.free / 1e6:.0f} MB of {usage.total / 1e6:.0f} MB "
            "are free, or a quota is used up); make the volume larger, or remove models that nobody uses"
        ) from error


def _partial(out: Path, origin: Origin, progress: Progress, resume_as: str) -> Path:
    """The folder that is filled: a new one, or the one that an earlier try left."""
    if not resume_as:
        fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
        fresh.chmod(0o755)
        return fresh
    # What was downloaded of another is not to be gone on with.
    digest = sha256(str(origin).encode()).hexdigest()[:8]
    kept = out.with_name(f".{out.name}.{resume_as}.{digest}.partial")
    if kept.is_dir():
        size = sum(path.stat().st_size for path in kept.rglob("*") if path.is_file())
        progress(f"resuming from {size / 1e6:.0f} MB that an earlier try downloaded")
    kept.mkdir(exist_ok=True)
    return kept


def _remove_abandoned(out: Path, progress: Progress, idle_s: float = ABANDONED_S, *, keep: Path | None = None) -> bool:
    """Pods that were killed for good leave their unfinished downloads, of any model, in a cache that others share.
    Whether there were any without a write for `idle_s`."""
    now, found = time.time(), False
    for folder in out.parent.glob(".*.partial"):
        if folder == keep:
            continue
        try:
            last = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
        except FileNotFoundError:
            # It is being written or removed just now.
            continue
        if now - last > idle_s:
            progress(f"removing {folder.name}, an unfinished download that nobody resumes")
            shutil.rmtree(folder, ignore_errors=True)
            found = found or not folder.exists()
    return found


def _complete(out: Path, origin: Origin, *, weights: bool) -> bool:
    if not out.exists():
        return False
    if not out.is_dir() or not any(out.iterdir()):
        return False
    if not (out / "config.json").is_file() or (weights and not any(out.glob("*.safetensors"))):
        raise WeightsError(f"{out} exists but does not hold a complete model; remove it or name another folder")
    check_origin(out, origin)
    verify_files(out)
    return True
