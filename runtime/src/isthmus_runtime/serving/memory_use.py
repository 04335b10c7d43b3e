"""What processes take of memory, and the limit that holds them: Linux's files about processes and control groups."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .pressure import Use

_PAGE = os.sysconf("SC_PAGE_SIZE")
_MOST_TEXT = 1 << 14
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class _Names:
    """Of a version of control groups."""

    limit: str
    usage: str
    cache: tuple[str, ...]
    """Lines of memory.stat that the kernel takes back before it ends anybody, but for what is shared memory."""
    shared: str


_V2 = _Names("memory.max", "memory.current", ("file", "slab_reclaimable"), "shmem")
_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_cache",), "total_shmem")


class _Text:
    """A small file that is read again and again."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> str:
        return os.pread(self._fd, _MOST_TEXT, 0).decode("ascii")

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)


class MemoryUse:
    """Reads what is used of a limit. A reading takes some microseconds."""

    def __init__(self, limit: int, group: Path | None, names: _Names = _V2, pid: int | None = None) -> None:
        """Of the control group in a folder; None: of this process and those added alone. Raises OSError."""
        self.limit = limit
        """Bytes."""
        self.of = "--memory-limit" if group is None else str(group / names.limit)
        self._names = names
        self._usage = None if group is None else _Text(group / names.usage)
        self._stat = None if group is None else _Text(group / "memory.stat")
        self._processes = [_statm(os.getpid() if pid is None else pid)]

    def add(self, pid: int) -> None:
        """A process that works for this one. Raises OSError where it is gone."""
        self._processes.append(_statm(pid))

    def read(self) -> Use:
        """The use as of now. Raises OSError."""
        mine = sum(map(_anonymous, self._processes))
        if self._usage is None or self._stat is None:
            return Use(mine, mine, self.limit)
        return Use(mine, int(self._usage.read()) - self._given_back(self._stat.read()), self.limit)

    def _given_back(self, stat: str) -> int:
        found = 0
        for line in stat.splitlines():
            name, _, value = line.partition(" ")
            if name in self._names.cache:
                found += int(value)
            elif name == self._names.shared:
                found -= int(value)
        return found


def find_limit(
    given: int | None, *, groups: Path = _CGROUPS, processes: Path = Path("/proc"), log: Callable[[str], None]
) -> MemoryUse | None:
    """What holds this process: a limit that was given, else its control group's. None: nothing, as `log` is told."""
    try:
        if given is not None:
            return MemoryUse(given, None)
        most = int((processes / "meminfo").read_text(encoding="ascii").split()[1]) * 1024
        found = [one for one in _limits(groups, processes) if one[0] < most]
        if found:
            limit, group, names = min(found, key=lambda one: one[0])
            return MemoryUse(limit, group, names)
    except (OSError, ValueError, IndexError) as error:
        log(f"the memory of this process cannot be watched: {error}")
        return None
    log("no limit of a control group and no --memory-limit: requests are refused by their own bounds alone")
    return None


def _limits(groups: Path, processes: Path) -> Iterator[tuple[int, Path, _Names]]:
    """Those of the control group of this process and of the ones around it, as far as they can be seen."""
    for line in (processes / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, names = groups, _V2
        elif "memory" in controllers.split(","):
            mount, names = groups / "memory", _V1
        else:
            continue
        inner = mount / path.lstrip("/")
        # In a container's namespace its own group is at the mount, whatever the path says.
        for folder in (inner, *inner.parents):
            if not folder.is_relative_to(mount):
                break
            with suppress(OSError, ValueError):  # the outermost has none; "max" is none
                yield int((folder / names.limit).read_text(encoding="ascii")), folder, names


def _statm(pid: int) -> _Text:
    return _Text(Path(f"/proc/{pid}/statm"))


def _anonymous(statm: _Text) -> int:
    """Bytes of a process that are no file's and not shared; 0 of one that is gone."""
    try:
        _, resident, shared, *_ = statm.read().split()
    except (ProcessLookupError, ValueError):
        return 0
    return (int(resident) - int(shared)) * _PAGE
