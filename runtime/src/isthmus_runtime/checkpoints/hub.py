"""Downloads a model from the Hugging Face hub: configuration, tokenizer and safetensors only."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, configure_http_backend, constants, hf_hub_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from requests import Session
from requests.exceptions import RequestException

from ..errors import WeightsError
from .fetching import MODEL_FILES, TOKENIZER_FILES, Progress, in_place, no_space
from .names import NESTED, choose_files
from .provenance import Origin, record_files
from .redirects import NoNearer
from .source_bytes import SourceBytes

_COMMIT = re.compile(r"^[0-9a-f]{40}$|^[0-9a-f]{64}$")
_AT_ONCE = 8
"""Files that are downloaded beside each other."""


def fetch(
    repo: str,
    revision: str,
    out: Path,
    progress: Progress,
    *,
    token: str = "",
    tokenizer_only: bool = False,
    resume_as: str = "",
) -> None:
    """Download `repo` at the commit that `revision` is now into `out`, which appears whole or not at all.

    `token`: access token; empty: what the environment offers (HF_TOKEN). `resume_as`: see `in_place`; the client goes
    on in the middle of a file. Raises WeightsError when the hub cannot be reached, has no such model or revision, lists
    names that could be written elsewhere, sends more or other than it lists or its client to addresses that are nearer
    than its own (`redirects`), or the model is of no supported kind.
    """
    origin = Origin(source=f"hf://{repo}", revision=revision)
    patterns = TOKENIZER_FILES if tokenizer_only else MODEL_FILES

    def download(folder: Path) -> None:
        progress(f"downloading {repo} at {revision}")
        with _errors_named(repo, revision), _bounded_client(origin.source) as bound:
            try:
                listing = _ask_listing(repo, revision, token or None)
                names = choose_files([*listing.sizes], patterns, source=origin.source)
                nested = [] if tokenizer_only else [name for name in NESTED if name in listing.sizes]
                _refuse_large(origin.source, {name: listing.sizes[name] for name in {*names, *nested}})
                bound.allow(_most_bytes([listing.sizes[name] for name in {*names, *nested}], folder))
                _download(repo, listing.commit, (*names, *nested), folder, token or None)
            except WeightsError:
                # Not to be gone on with, nor to be left in a cache that others share.
                shutil.rmtree(folder, ignore_errors=True)
                raise
            except OSError as e:
                if type(e) is OSError and not no_space(e):
                    # Its check of a file's size failed: what came may be another's page, and is not to be gone on with.
                    shutil.rmtree(folder / ".cache", ignore_errors=True)
                raise
        shutil.rmtree(folder / ".cache", ignore_errors=True)
        for name in nested:
            (folder / name).replace(folder / NESTED[name])
            names.append(NESTED[name])
        expected, blobs = _as_named_here(listing.sha256), _as_named_here(listing.blobs)
        for path in folder.iterdir():
            if path.name not in names:
                # Of an earlier try, when the revision was another commit.
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        try:
            record_files(folder, origin, commit=listing.commit, expected=expected, blobs=blobs)
        except WeightsError:
            shutil.rmtree(folder)
            raise

    in_place(out, origin, progress, download, weights=not tokenizer_only, resume_as=resume_as)


@dataclass(frozen=True, slots=True)
class _Listing:
    commit: str
    sizes: dict[str, int | None]
    """Of each file, in bytes; None where the hub does not say."""
    sha256: dict[str, str]
    """Of large files."""
    blobs: dict[str, str]
    """Of the others, git's names for what is in them, as far as a mirror says them."""


def _as_named_here(told: Mapping[str, str]) -> dict[str, str]:
    """What is told of files, by the names that they have in a model's folder."""
    return {**told, **{here: told[there] for there, here in NESTED.items() if there in told}}


def _ask_listing(repo: str, revision: str, token: str | None) -> _Listing:
    source = f"hf://{repo}"
    try:
        found = HfApi().model_info(repo, revision=revision, files_metadata=True, token=token)
        commit, files = found.sha or "", found.siblings or []
        sizes = {file.rfilename: file.size for file in files}
        sha256 = {file.rfilename: file.lfs.sha256 for file in files if file.lfs is not None}
        blobs = {file.rfilename: file.blob_id for file in files if file.lfs is None and file.blob_id is not None}
        texts = (commit, *sizes, *sha256.values(), *blobs.values())
        readable = all(isinstance(text, str) for text in texts) and all(
            size is None or (isinstance(size, int) and size >= 0) for size in sizes.values()
        )
    except (AttributeError, KeyError, RecursionError, TypeError) as e:
        # The client believes what it is sent.
        raise WeightsError(f"{source}: the hub's listing is none: {type(e).__name__}: {e}") from e
    if not readable:
        raise WeightsError(f"{source}: the hub's listing has names or hashes that are no text, or odd sizes")
    if not _COMMIT.match(commit):
        raise WeightsError(f"{source}: the hub gave {commit!r} for revision {revision!r}, which is no commit")
    return _Listing(commit, sizes, sha256, blobs)


def _refuse_large(source: str, sizes: Mapping[str, int | None]) -> None:
    """The hub gives no larger files to clients that read them as they are; to ask for them is an error at the end."""
    for name, size in sizes.items():
        if (size or 0) > constants.MAX_HTTP_DOWNLOAD_SIZE:
            raise _too_large(source, f"{name} has {(size or 0) / 1e9:.1f} GB")


def _too_large(source: str, what: str) -> WeightsError:
    return WeightsError(
        f"{source}: {what}, and a file of more than {constants.MAX_HTTP_DOWNLOAD_SIZE / 1e9:.0f} GB cannot be"
        " downloaded from a hub here: take a repository whose weights are in smaller files, or put the model in place"
        " (hostPath, pvc or s3)"
    )


def _most_bytes(sizes: Sequence[int | None], folder: Path) -> int:
    """A mirror may list no sizes; of what is free, others that share the cache have half."""
    unknown = shutil.disk_usage(folder).free // 2 if None in sizes else 0
    return unknown or sum(size or 0 for size in sizes)


def _download(repo: str, commit: str, names: Sequence[str], folder: Path, token: str | None) -> None:
    def one(name: str) -> None:
        # Each by its name, not as a snapshot: that would ask for the listing again, and believe it.
        try:
            hf_hub_download(repo, name, revision=commit, local_dir=folder, token=token)
        except ValueError as e:
            if type(e) is not ValueError:
                raise
            # So it refuses a size that the listing did not have, with advice about what is turned off here.
            raise _too_large(f"hf://{repo}", f"the hub's client refuses {name}, most likely for its size") from e

    with ThreadPoolExecutor(_AT_ONCE, "download") as pool:
        for done in [pool.submit(one, name) for name in names]:
            done.result()


@contextmanager
def _bounded_client(source: str) -> Iterator[SourceBytes]:
    """Have the hub's client ask no address nearer than the hub, and read no more than is allowed."""
    # Clients of their own, which write what they are sent, wherever it comes from.
    constants.HF_HUB_DISABLE_XET = True
    constants.HF_HUB_ENABLE_HF_TRANSFER = False
    bound, adapter = SourceBytes(source), NoNearer(source)

    def session() -> Session:
        made = Session()
        made.mount("http://", adapter)
        made.mount("https://", adapter)
        made.hooks["response"].append(bound.watch)
        return made

    configure_http_backend(session)
    try:
        yield bound
    finally:
        configure_http_backend()


@contextmanager
def _errors_named(repo: str, revision: str) -> Iterator[None]:
    """Errors of the hub's client as WeightsErrors that say what to do; a full disk as it is."""
    try:
        yield
    except GatedRepoError as e:
        raise WeightsError(f"{repo} needs its licence accepted on the hub, and an access token: {e}") from e
    except RevisionNotFoundError as e:
        raise WeightsError(f"{repo} has no revision {revision!r}") from e
    except RepositoryNotFoundError as e:
        raise WeightsError(f"{repo} does not exist on the hub, or is private and no access token was given") from e
    except HFValidationError as e:
        raise WeightsError(f"{repo!r} is not a hub id of the form owner/name: {e}") from e
    except (LocalEntryNotFoundError, HfHubHTTPError, RequestException, OSError) as e:
        if no_space(e):
            raise
        raise WeightsError(
            f"the hub could not be reached for {repo} at {revision}: {type(e).__name__}: {e}. "
            "Check the network or HF_ENDPOINT, or copy the model here and name its directory"
        ) from e
