"""What the open descriptors of a process are: how many are no connection, and which connections of which state."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_STATES = {
    "01": "open",
    "02": "connecting",
    "03": "accepting",
    "04": "closing",
    "05": "closing",
    "06": "closing",
    "08": "left by its peer",
    "09": "closing",
    "0A": "listening",
    "0B": "closing",
}


@dataclass(frozen=True, slots=True)
class Connection:
    """One TCP socket that a process holds."""

    state: str
    local_port: int
    peer: str
    """Name of the member at the other end, or its address."""


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Everything a process has open."""

    others: Mapping[str, int]
    """What is no TCP connection, by kind, listening sockets included."""
    connections: tuple[Connection, ...]

    @property
    def total(self) -> int:
        """Open descriptors."""
        return sum(self.others.values()) + len(self.connections)


def descriptors_of(pid: int, names: Mapping[str, str]) -> Descriptors:
    """Descriptors of a process. `names`: members by IP address."""
    table = _tcp_table(pid)
    others: Counter[str] = Counter()
    connections: list[Connection] = []
    folder = Path(f"/proc/{pid}/fd")
    for name in os.listdir(folder):
        try:
            target = os.readlink(folder / name)
        except FileNotFoundError:
            continue  # just closed
        if target == "/":
            continue  # libuv's reserve, from the first time without descriptors on: it closes it to accept and refuse
        found = table.get(target)
        if found is None:
            # An event loop's own pair of sockets, a pipe, a file. On a full disk a log is a file, else a pipe.
            others["pipe" if target.endswith("/log") else target.partition(":")[0] if ":" in target else target] += 1
            continue
        state, local_port, address = found
        if state == "listening":
            others["listening socket"] += 1
        else:
            connections.append(Connection(state, local_port, names.get(address, address)))
    return Descriptors(others, tuple(connections))


def _tcp_table(pid: int) -> dict[str, tuple[str, int, str]]:
    """State, local port and peer's IPv4 address by `socket:[inode]`, in the process's network namespace."""
    found: dict[str, tuple[str, int, str]] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            local, remote, state, inode = words[1], words[2], words[3], words[9]
            raw = bytes.fromhex(remote.partition(":")[0])[-4:]
            address = ".".join(str(b) for b in reversed(raw))
            found[f"socket:[{inode}]"] = (_STATES.get(state, state), int(local.partition(":")[2], 16), address)
    return found
