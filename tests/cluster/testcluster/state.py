"""What a cluster has made on this machine, written before it is made, so that `down` works after a crash."""

import json
import os
import select
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


class LeftoverError(RuntimeError):
    """Something of the cluster is still there after `down`."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process known by its id and its start time, since ids are used again."""

    name: str
    pid: int
    start: int

    def alive(self) -> bool:
        return start_time(self.pid) == self.start


@dataclass(slots=True)
class State:
    """The processes and cgroups of the cluster in `folder`."""

    folder: Path
    processes: list[Process] = field(default_factory=list)
    cgroup: str = ""

    @property
    def path(self) -> Path:
        return self.folder / "state.json"

    def save(self) -> None:
        body = {
            "processes": [asdict(process) for process in self.processes],
            "cgroup": self.cgroup,
        }
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(body, indent=1) + "\n")
        partial.rename(self.path)

    def add_process(self, name: str, pid: int) -> Process:
        start = start_time(pid)
        if start is None:
            raise RuntimeError(f"{name} (process {pid}) ended at once; see {self.folder}")
        process = Process(name, pid, start)
        self.processes.append(process)
        self.save()
        return process


def load(folder: Path) -> State | None:
    """Read the state of the cluster in `folder`; None where there is none."""
    path = folder / "state.json"
    if not path.exists():
        return None
    body = json.loads(path.read_text())
    processes = [Process(**one) for one in body["processes"]]
    return State(folder, processes, body["cgroup"])


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if it is gone (or a zombie)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may hold anything; what follows it may not.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def command_line(pid: int) -> bytes:
    """The arguments of the process, each ended by a zero byte; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def children(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def wait_gone(pids: Sequence[int], seconds: float) -> list[int]:
    """Wait until these processes have ended; return those that have not after `seconds`."""
    deadline = time.monotonic() + seconds
    left = list(pids)
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            left.remove(pid)
            continue
        try:
            ready, _, _ = select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(handle)
        if ready:
            left.remove(pid)
    return left


def remove_cgroups(cgroup: str, seconds: float = 10.0) -> None:
    """Remove `cgroup` and all below it in every hierarchy; raises LeftoverError when one stays in use."""
    if not cgroup:
        return
    deadline = time.monotonic() + seconds
    while True:
        busy: OSError | None = None
        for root in cgroup_roots(cgroup):
            for folder, _, _ in os.walk(root, topdown=False):
                try:
                    os.rmdir(folder)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    busy = error
        if busy is None:
            return
        if time.monotonic() > deadline:
            raise LeftoverError(f"cgroup {busy.filename} is still in use after {seconds:.0f} s")
        # The kernel reports a cgroup as busy for a moment after its last process: there is nothing to wait on.
        time.sleep(0.05)


def cgroup_roots(cgroup: str) -> list[Path]:
    """The folder of `cgroup` in each mounted hierarchy: one for cgroup v2, one a controller for v1."""
    relative = cgroup.strip("/")
    candidates = [CGROUPS / relative, *(one / relative for one in CGROUPS.iterdir() if one.is_dir())]
    return [one for one in candidates if relative and one.is_dir()]
