"""Adapters that a file lists, such as a ConfigMap that is mounted into a pod: what the engine has follows the file.

The file is a JSON list of {"name", "path"}, `path` the absolute folder of an adapter. It owns the names that it has
brought, and no others. An adapter is its path: whose files change in place is not read again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ..errors import ConfigError, RequestError, UnknownModel
from .adapter_registry import AdapterRegistry
from .seam import AdapterList, AdapterProblem

POLL_S = 2.0
MOST_BYTES = 1 << 20
"""What a ConfigMap may have."""
MOST_ADAPTERS = 1024
FIRST_RETRY_S = 5.0
LAST_RETRY_S = 300.0
_MOST_TEXT = 256
"""Of a problem. The operator reads 64 KiB of /info at most, with those of 64 adapters in it."""

_log = logging.getLogger(__name__)


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=256)
    path: str = Field(min_length=2, max_length=4096, pattern="^/")


_ENTRIES = TypeAdapter(list[_Entry])


@dataclass(frozen=True, slots=True)
class _Brought:
    path: str
    digest: str


@dataclass(frozen=True, slots=True)
class _Failed:
    path: str
    problem: str
    times: int
    again: float


def read_entries(raw: bytes) -> dict[str, str]:
    """Path by name. Raises ConfigError with what is wrong with the file."""
    if len(raw) > MOST_BYTES:
        raise ConfigError(f"has {len(raw)} bytes or more; at most {MOST_BYTES} are read")
    try:
        entries = _ENTRIES.validate_json(raw)
    except ValidationError as e:
        places = (("".join(f"[{part}]" for part in error["loc"]), error["msg"]) for error in e.errors())
        raise ConfigError([f"{place} {message}".strip() for place, message in places]) from e
    if len(entries) > MOST_ADAPTERS:
        raise ConfigError(f"lists {len(entries)} adapters; at most {MOST_ADAPTERS}")
    found = {entry.name: entry.path for entry in entries}
    if len(found) < len(entries):
        names = [entry.name for entry in entries]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigError(f"lists {', '.join(map(repr, twice))} more than once; give each adapter one entry")
    return found


class ListedAdapters:
    """Brings the adapters of an engine to what a file lists. One thread calls `turn`; `status` any."""

    def __init__(self, registry: AdapterRegistry, path: Path, *, reserved: Collection[str] = ()) -> None:
        """`reserved`: names of other adapters, which the file may not have."""
        self._registry = registry
        self._path = path
        self._reserved = frozenset(reserved)
        self._raw: bytes | None = None
        self._wanted: dict[str, str] = {}
        self._brought: dict[str, _Brought] = {}
        self._failed: dict[str, _Failed] = {}
        self._problem = ""
        self._status = AdapterList()

    @property
    def status(self) -> AdapterList:
        """What the last turn has come to."""
        return self._status

    def turn(self, now: float) -> None:
        """Read the file, and load and unload what it takes. `now`: monotonic seconds.

        A file that cannot be read or understood changes nothing: what was listed before stays wanted. An adapter that
        cannot be loaded is tried again, later each time; one that cannot be replaced stays as it was."""
        self._read()
        for name in [name for name in self._brought if name not in self._wanted]:
            self._unload(name)
        self._failed = {name: old for name, old in self._failed.items() if self._wanted.get(name) == old.path}
        digests = {one.name: one.digest for one in self._registry.names}
        for name, path in self._wanted.items():
            brought = self._brought.get(name)
            if brought is None or brought.path != path or digests.get(name) != brought.digest:
                self._load(name, path, now)
        told = [AdapterProblem("", self._problem)] if self._problem else []
        told += [AdapterProblem(name, failed.problem) for name, failed in self._failed.items()]
        digest = "" if self._raw is None else sha256(self._raw).hexdigest()[:16]
        self._status = AdapterList(digest, len(self._wanted), tuple(told))

    def _read(self) -> None:
        try:
            with self._path.open("rb") as file:
                raw = file.read(MOST_BYTES + 1)
            if raw != self._raw:
                self._wanted = read_entries(raw)
                self._raw = raw
                _log.info("--lora-file %s lists %d adapters", self._path, len(self._wanted))
            problem = ""
        except OSError as e:
            problem = f"--lora-file {self._path} cannot be read: {e.strerror or e}; what was listed before stays"
        except ConfigError as e:
            problem = f"--lora-file {self._path}: {'; '.join(e.problems)}; what was listed before stays"[:_MOST_TEXT]
        if problem and problem != self._problem:
            _log.warning("%s", problem)
        self._problem = problem

    def _load(self, name: str, path: str, now: float) -> None:
        before = self._failed.get(name)
        if before is not None and now < before.again:
            return
        try:
            if name in self._reserved:
                raise ConfigError(f"the name {name!r} is that of another --lora; give the adapter one of its own")
            adapter = self._registry.load(name, path, replace=name in self._brought)
        except ConfigError as e:
            problem = "; ".join(e.problems)
        except RequestError as e:
            problem = e.message
        except Exception as e:  # of whatever lies in the folder; the others of the file are not to wait for it
            _log.exception("adapter %s of --lora-file could not be loaded", name)
            problem = f"{type(e).__name__}: {e}"
        else:
            self._brought[name] = _Brought(path, adapter.digest)
            self._failed.pop(name, None)
            return
        times = 1 if before is None else before.times + 1
        wait = min(LAST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(times - 1, 16))
        self._failed[name] = _Failed(path, problem[:_MOST_TEXT], times, now + wait)
        _log.warning("adapter %s of --lora-file cannot be loaded, again in %g s: %s", name, wait, problem)

    def _unload(self, name: str) -> None:
        del self._brought[name]
        try:
            self._registry.unload(name)
        except UnknownModel:
            _log.info("adapter %s, which --lora-file no longer lists, was unloaded before", name)


class AdapterFileThread:
    """Turns of `listed`, every POLL_S until `stop`."""

    def __init__(self, listed: ListedAdapters, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds."""
        self._listed = listed
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="adapter-file", daemon=True)

    def start(self) -> None:
        """Begin, after a first turn of the caller's."""
        self._thread.start()

    def stop(self) -> None:
        """No further turn begins. Does not wait for one that reads an adapter."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            self._listed.turn(self._clock())
