"""What requests hold while they wait for an engine, beside what the server's books say that they do."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measuring import Server, call, status_kib

_MIB = 1 << 20
_MOST_BYTES, _MOST_REQUESTS = 48 << 20, 64
"""Of all bodies together, and how many at most."""
SMALL_MIB, FACTOR = 16.0, 2.0
"""Growth that is too little to be told from noise, and how many times the books a process may grow."""
_NO_CHANGE_S = 0.6
_ALL_S = 60.0
"""Until all are answered, or wait for the engine."""


@dataclass
class Held:
    """By several requests alike."""

    id: str
    requests: int
    running: int
    """Those that the engine has, each choice of each."""
    statuses: dict[int, int]
    """Of those that were answered before the engine went on."""
    wire: int
    grown_mib: float
    books_mib: float
    stays_mib: float

    @property
    def flags(self) -> str:
        """`uncounted`: the process has grown by more than the books say."""
        uncounted = self.grown_mib > SMALL_MIB and self.grown_mib > FACTOR * self.books_mib + SMALL_MIB
        return ",".join(["uncounted"] * uncounted + ["stays"] * (self.stays_mib > 3 * SMALL_MIB))

    def json(self) -> dict[str, Any]:
        """For a file."""
        return {**asdict(self), "flags": self.flags}

    def __str__(self) -> str:
        return (
            f"{self.id} x {self.requests} running={self.running} {self.statuses} wire={self.wire} "
            f"grown={self.grown_mib:.1f} books={self.books_mib:.1f} stays={self.stays_mib:.1f} {self.flags}"
        )


def engine(port: int, what: str) -> int:
    """Have the engine of upstream.py `hold`, answer `later` or `go` on: how many requests it has."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{what}", method="POST")
    with urllib.request.urlopen(request, timeout=10) as response:
        return int(response.read())


def settled_mib(server: Server) -> float:
    """Of the process when it has given back what is free."""
    before = -1.0
    until = time.monotonic() + _ALL_S
    while True:
        server.settle()
        now = status_kib(server.pid, "VmRSS") / 1024
        if abs(now - before) < 0.5 or time.monotonic() > until:
            return now
        before = now
        time.sleep(_NO_CHANGE_S)


def _at_once(
    server: Server, path: str, sent: bytes, count: int, addresses: int
) -> tuple[list[threading.Thread], list[int]]:
    """`count` requests from so many addresses: their threads, which run, and the statuses of those with an answer."""
    statuses: list[int] = []

    def ask(number: int) -> None:
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        statuses.append(call(server.port, path, sent, headers, f"127.0.1.{1 + number % addresses}")[0])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads, statuses


def held(server: Server, behind: int, name: str, path: str, raw: bytes, sent: bytes, when: str = "hold") -> Held:
    """`sent` is `raw` packed. `when` they wait: before their first token (`hold`), or after it (`later`)."""
    trim = Path(f"{server.books}.trim")
    trim.touch()
    try:
        count = max(2, min(_MOST_REQUESTS, _MOST_BYTES // len(raw)))
        before = settled_mib(server)
        engine(behind, when)
        threads, statuses = _at_once(server, path, sent, count, 2)
        until = time.monotonic() + _ALL_S
        while len(statuses) + (running := engine(behind, when)) < count and time.monotonic() < until:
            time.sleep(0.2)
        grown = settled_mib(server) - before
        time.sleep(0.25)  # the books are written ten times a second
        books = server.held() / _MIB
        early = dict(Counter(statuses))
        engine(behind, "go")
        for thread in threads:
            thread.join()
        time.sleep(1.2)
        return Held(name, count, running, early, len(sent), grown, books, settled_mib(server) - before)
    finally:
        trim.unlink()


def read(file: Path) -> list[dict[str, Any]]:
    """Rows of a file."""
    return [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []


@dataclass
class Crowd:
    """What many of the same at once bring a process to that has a limit of memory."""

    id: str
    requests: int
    statuses: dict[int, int]
    limit_mib: int
    peak_mib: float
    """Of the process: beyond the limit a pod would be gone."""
    others_s: float
    refused: int
    """Of others' requests, while it lasted."""

    @property
    def flags(self) -> str:
        """`killed`: or would be."""
        return "killed" * (self.peak_mib > self.limit_mib)

    def json(self) -> dict[str, Any]:
        """For a file."""
        return {**asdict(self), "flags": self.flags}

    def __str__(self) -> str:
        return (
            f"{self.id} x {self.requests} {self.statuses} peak={self.peak_mib:.0f} of {self.limit_mib} "
            f"others={self.others_s:.2f} refused={self.refused} {self.flags}"
        )


def crowd(server: Server, name: str, path: str, sent: bytes, *, count: int, limit_mib: int) -> Crowd:
    """`count` at once, from four addresses."""
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")
    server.tell("reset")
    threads, statuses = _at_once(server, path, sent, count, 4)
    for thread in threads:
        thread.join()
    server.settle()
    told = server.tell("tell")
    peak = status_kib(server.pid, "VmHWM") / 1024
    others = max(told["short"][0], told["long"][0])
    time.sleep(2)
    return Crowd(name, count, dict(Counter(statuses)), limit_mib, peak, others, sum(one[2] for one in told.values()))
