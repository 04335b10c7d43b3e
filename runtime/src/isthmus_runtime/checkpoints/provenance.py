"""Where a model folder's files came from, and whether they are still those: written once it is whole, checked at load.

`isthmus-source.json` names source, revision and commit, and size and SHA-256 of every file. At each start sizes of all
files are compared, and hashes of all but the large ones (`LARGE_BYTES`): reading every weight twice would double the
start. `isthmus-runtime model verify DIR` compares every hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from ..errors import WeightsError

SOURCE_FILE = "isthmus-source.json"
MARKER = "isthmus-import.json"
"""What `model import` writes: the GGUF file that a folder was made from."""
LARGE_BYTES = 64 << 20
_READ_WHEN_SERVING = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """A file as it was downloaded."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What is asked for."""

    source: str
    """As `model fetch` takes it, without the revision: `hf://owner/name`, `s3://bucket/prefix`."""
    revision: str = ""
    """As it was asked for: a branch, a tag or a commit."""
    store: str | None = ""
    """Which server's: endpoint and region of one that is not AWS. None: that was not recorded."""

    def __str__(self) -> str:
        revision, store = self.revision and f"@{self.revision}", self.store and f" of {self.store}"
        return f"{self.source}{revision}{store or ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance(Origin):
    """The content of SOURCE_FILE."""

    store: str | None = None
    commit: str = ""
    """What the revision was then, and what was downloaded."""
    files: dict[str, FileDigest]


_PROVENANCE = TypeAdapter(Provenance)


def record_files(
    folder: Path,
    origin: Origin,
    *,
    commit: str = "",
    expected: Mapping[str, str] | None = None,
    blobs: Mapping[str, str] | None = None,
) -> None:
    """Write SOURCE_FILE for the files of `folder`. `expected`: SHA-256 by name, where the source tells it; `blobs`: the
    same of what git calls them.

    Raises:
        WeightsError: a file is not what its source said, or not a plain file (a link could lead anywhere).
    """
    files: dict[str, FileDigest] = {}
    problems: list[str] = []
    source = origin.source
    for path in sorted(path for path in folder.iterdir() if path.name != SOURCE_FILE):
        if path.is_symlink() or not path.is_file():
            problems.append(f"{source}: {path.name} is not a plain file")
            continue
        files[path.name] = FileDigest(size=path.stat().st_size, sha256=sha256_of(path))
        want = (expected or {}).get(path.name)
        if want and want != files[path.name].sha256:
            problems.append(f"{source}: {path.name} has SHA-256 {files[path.name].sha256}, its source says {want}")
        blob = (blobs or {}).get(path.name)
        if blob and blob != (found := git_blob_of(path)):
            problems.append(f"{source}: {path.name} is {found} to git, its source says {blob}")
    if problems:
        raise WeightsError(problems[:_SHOWN])
    made = Provenance(source=source, revision=origin.revision, store=origin.store, commit=commit, files=files)
    (folder / SOURCE_FILE).write_text(json.dumps(asdict(made), indent=2) + "\n", encoding="utf-8")


def read_provenance(folder: Path) -> Provenance | None:
    """None for a folder that was not fetched. WeightsError when the record cannot be read."""
    try:
        raw = (folder / SOURCE_FILE).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return _PROVENANCE.validate_json(raw)
    except ValidationError as e:
        raise WeightsError(f"{folder / SOURCE_FILE} cannot be read ({e.error_count()} errors); fetch it again") from e


def check_origin(folder: Path, wanted: Origin) -> None:
    """WeightsError for a folder whose record names another source, revision or server."""
    made = read_provenance(folder)
    if made is None:
        return
    store = wanted.store if made.store is None else made.store
    found = Origin(source=made.source.rstrip("/"), revision=made.revision, store=store)
    if found != wanted:
        raise WeightsError(
            f"{folder} holds {found}, and {wanted} is asked for; name another folder (of a service: another cache), "
            "or remove it"
        )


def verify_files(folder: Path, *, every_byte: bool = False) -> bool:
    """Compare a folder with its record; False when it has none (a folder of one's own).

    Raises:
        WeightsError: names every file that is missing, changed, or was added where serving would read it; of a folder
            without a record, each that is a link to somewhere else.
    """
    made = read_provenance(folder)
    if made is None:
        _check_links(folder)
        return False
    problems: list[str] = []
    for name, want in made.files.items():
        path = folder / name
        if Path(name).name != name or path.is_symlink() or not path.is_file():
            problems.append(f"{path} is missing or not a plain file")
        elif (size := path.stat().st_size) != want.size:
            problems.append(f"{path} has {size} bytes, {want.size} were downloaded")
        elif (every_byte or size <= LARGE_BYTES) and (found := sha256_of(path)) != want.sha256:
            problems.append(f"{path} has SHA-256 {found}, {want.sha256} was downloaded")
    read = {path.name for pattern in _READ_WHEN_SERVING for path in folder.glob(pattern)}
    for name in sorted(read - made.files.keys() - {SOURCE_FILE, MARKER}):
        problems.append(f"{folder / name} is not among the files that were downloaded")
    if problems:
        more = len(problems) - _SHOWN
        hint = f"remove {folder} and fetch {made.source} again"
        raise WeightsError([*problems[:_SHOWN], hint if more <= 0 else f"and {more} more; {hint}"])
    return True


def _check_links(folder: Path) -> None:
    """Whoever made a folder that is mounted may know where keys and tokens lie beside it; what a chat template says,
    clients read. The hub's own cache keeps files beside its snapshots, and links to them."""
    within = folder.resolve()
    if within.parent.name == "snapshots" and within.parent.parent.name.startswith("models--"):
        within = within.parent.parent
    problems = []
    for path in sorted(path for pattern in (*_READ_WHEN_SERVING, "*/config.json") for path in folder.glob(pattern)):
        try:
            found = path.resolve()
        except (OSError, RuntimeError) as error:  # a link to itself
            problems.append(f"{path} leads nowhere: {error}")
            continue
        if not found.is_relative_to(within):
            problems.append(f"{path} is a link to {found}, outside of the model's folder; put the file itself there")
    if problems:
        raise WeightsError(problems[:_SHOWN])


def pinned_revision(folder: Path) -> str:
    """What exactly is served: the commit of a model of the hub, `files:` with a SHA-256 over the digests of one of
    object storage, `gguf:` with that of an imported file; empty for a folder that says none of these."""
    made = read_provenance(folder)
    if made is not None:
        lines = "".join(f"{file.sha256}  {name}\n" for name, file in sorted(made.files.items()))
        return made.commit or f"files:{hashlib.sha256(lines.encode()).hexdigest()}"
    imported = _imported(folder)
    return imported and f"gguf:{imported}"


def recorded_digests(folder: Path) -> dict[str, str]:
    """SHA-256 by name of a folder's weights as they were downloaded, or of the GGUF file that they were made from."""
    made, imported = read_provenance(folder), _imported(folder)
    names = [path.name for path in folder.glob("*.safetensors")]
    if made is not None:
        return {name: made.files[name].sha256 for name in names if name in made.files}
    return dict.fromkeys(names, imported) if imported else {}


def _imported(folder: Path) -> str:
    """SHA-256 of the GGUF file; empty for a folder that was not made from one."""
    try:
        held = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(held["sha256"]) if isinstance(held, dict) and isinstance(held.get("sha256"), str) else ""


def git_blob_of(path: Path) -> str:
    """Of a file's content, in hex: what git calls it (SHA-1 over its kind, its size and it)."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
