"""What one machine runs: the specification that machine.py reads."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

READY_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One program: how it is started and how it shows that it is ready (an URL that answers 200, or a socket)."""

    name: str
    argv: tuple[str, ...]
    url: str | None = None
    socket: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    fds: tuple[int, ...] = ()

    def spec(self, folder: Path) -> dict[str, Any]:
        """The JSON form, logging to `folder/<name>.log`."""
        ready: dict[str, Any] | None = None
        if self.url is not None:
            ready = {"url": self.url, "deadline": READY_DEADLINE_S}
        elif self.socket is not None:
            ready = {"socket": self.socket, "deadline": READY_DEADLINE_S}
        return {
            "name": self.name,
            "argv": list(self.argv),
            "env": dict(self.env),
            "fds": list(self.fds),
            "log": str(folder / f"{self.name}.log"),
            "ready": ready,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpec:
    """One machine. With `namespaces` it has its own network, mounts, processes and host name.

    `binds`: (host folder, where the machine sees it). `sysctls`: settings of its own network namespace.
    `shadow_sysctls`: machine-wide settings it believes to have. `follow`: stop when standard input ends.
    `cgroup`: the cgroup that it takes for the root of each hierarchy.
    """

    name: str
    namespaces: bool
    follow: bool
    cgroup: str = ""
    binds: Sequence[tuple[str, str]] = ()
    sysctls: Mapping[str, str] = field(default_factory=dict)
    shadow_sysctls: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path, programs: Sequence[Program]) -> Path:
        """Write the specification with its programs into `folder` and return its path."""
        path = folder / f"{self.name}.json"
        body = {**asdict(self), "programs": [program.spec(folder) for program in programs]}
        path.write_text(json.dumps(body, indent=1) + "\n")
        return path
