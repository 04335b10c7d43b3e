"""Which of the files that a source lists are downloaded, and listings that are refused for their names. Pure.

A source is not trusted to name files: a name decides where bytes are written.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from ..errors import WeightsError
from ..models.pooling import POOLING_HERE, POOLING_THERE
from .provenance import MARKER, SOURCE_FILE

MAX_PART_BYTES = 200
"""Of a file's name, or of a folder's in a listing: file systems take 255, and downloads add endings of their own."""
MAX_NAME_BYTES = 1024
MAX_FILES = 10_000
INDEX = "model.safetensors.index.json"
"""Which file each tensor is read from."""
NESTED: Mapping[str, str] = MappingProxyType({POOLING_THERE: POOLING_HERE})
"""Files in folders of a source that belong to a model's weights -> their names in its own folder, which has none."""
OURS = (SOURCE_FILE, MARKER, *NESTED.values())
"""Files that only we name so."""
_SHOWN = 8
_DRIVE = re.compile(r"^[A-Za-z]:")


def choose_files(listed: Sequence[str], patterns: Iterable[str], *, source: str) -> list[str]:
    """The files directly in the source's top folder that match a pattern, sorted.

    Raises:
        WeightsError: the listing has names, wanted or not, that could be written outside the model's folder or over
            another file: no honest source does. It quotes up to eight of them, and nothing is downloaded.
    """
    if len(listed) > MAX_FILES:
        raise WeightsError(f"{source} lists {len(listed)} files; a model has at most {MAX_FILES}")
    problems = [f"{source} lists a file {_shown(name)}: {problem}" for name in listed if (problem := _problem(name))]
    top = sorted(
        {
            name
            for name in listed
            if "/" not in name and name not in OURS and any(fnmatch.fnmatchcase(name, p) for p in patterns)
        }
    )
    first: dict[str, str] = {}
    for name in top:
        if (other := first.setdefault(name.casefold(), name)) != name:
            problems.append(f"{source} lists {_shown(other)} and {_shown(name)}, which differ in case alone")
    if problems:
        more = len(problems) - _SHOWN
        raise WeightsError(problems[:_SHOWN] + ([f"{source}: and {more} more such names"] if more > 0 else []))
    return top


def _problem(name: str) -> str:
    """Why a listed name is refused; empty when it is not."""
    parts = name.split("/")
    if not name or "\0" in name or any(ord(char) < 32 or ord(char) == 127 for char in name):
        return "it is empty or has control characters"
    if len(_bytes(name)) > MAX_NAME_BYTES or any(len(_bytes(part)) > MAX_PART_BYTES for part in parts):
        return f"it is longer than {MAX_NAME_BYTES} bytes, or a part of it than {MAX_PART_BYTES}"
    if name.startswith(("/", "~")) or _DRIVE.match(name):
        return "it is an absolute path"
    if "\\" in name:
        return "it has a backslash"
    if any(part in ("", ".", "..") for part in parts):
        return "it leaves the model's folder or is no path"
    return ""


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


def _shown(name: str) -> str:
    return ascii(name if len(name) <= 80 else name[:77] + "...")
