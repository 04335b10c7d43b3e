"""A slow disk for single processes: a control group with limits on the bytes that they read and write.

The kernel holds up a process that reads what is not in memory; a write goes to memory first, and is held up when the
process waits for the disk.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def controller() -> Path | None:
    """The hierarchy that limits block devices (version 1 or 2), or None where this kernel or container has none."""
    first, second = _ROOT / "blkio", _ROOT / "cgroup.subtree_control"
    if (first / "cgroup.procs").exists() and os.access(first, os.W_OK):
        return first
    if second.exists() and "io" in second.read_text().split() and os.access(_ROOT, os.W_OK):
        return _ROOT
    return None


class Disk:
    """Slows down what `folders` lie on. `up` first, `down` when no process is left in it."""

    def __init__(self, root: Path, folders: Sequence[Path]) -> None:
        self._root = root
        self._second = root == _ROOT
        self._home = root / _group_of_this_process("" if self._second else "blkio")
        numbers = {os.stat(folder).st_dev for folder in folders}
        self._devices = [f"{os.major(n)}:{os.minor(n)}" for n in numbers if os.major(n)]
        self._groups: list[Path] = []

    def group(self, name: str, bytes_per_s: int) -> Path:
        """A new group in which each device takes and gives `bytes_per_s`."""
        path = self._root / f"isthmus-chaos-{os.getpid()}-{name}"
        path.mkdir()
        self._groups.append(path)
        for device in self._devices:
            if self._second:
                (path / "io.max").write_text(f"{device} rbps={bytes_per_s} wbps={bytes_per_s}")
            else:
                for way in ("read", "write"):
                    (path / f"blkio.throttle.{way}_bps_device").write_text(f"{device} {bytes_per_s}")
        return path

    def put(self, pid: int, group: Path | None) -> None:
        """Move a process, all its threads, into the group; None: back to where this one is. One that is gone is left
        alone."""
        try:
            ((group or self._home) / "cgroup.procs").write_text(str(pid))
        except ProcessLookupError:
            return

    def remove(self, group: Path) -> None:
        """Remove a group; what is left in it, children of who was put there, goes to where this process is."""
        self._groups.remove(group)
        while left := (group / "cgroup.procs").read_text().split():
            for pid in left:
                self.put(int(pid), None)
        group.rmdir()

    def down(self) -> None:
        """Remove what is left."""
        for group in list(self._groups):
            self.remove(group)


def _group_of_this_process(controller: str) -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.lstrip("/")
    return ""


def enter(group: Path) -> list[str]:
    """The command prefix that starts a program in the group; the program keeps the pid."""
    return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]


def forget_pages(folder: Path) -> None:
    """Drop a folder's files from memory, so that reading them means reading the disk."""
    for file in folder.iterdir():
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def disk_bytes(pid: int) -> tuple[int, int]:
    """Bytes that a process has made the disk read and write."""
    lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])
